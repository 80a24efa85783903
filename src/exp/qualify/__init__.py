"""task=qualify: one command that proves a machine, and one folder that shows it.

The parent plans rows (:mod:`~exp.qualify.plan`) and makes each by ``python -m exp`` in a process of its own
(:mod:`~exp.qualify.child`, :mod:`~exp.qualify.kit`), so that nothing that a driver does can end the kit. It judges what
they leave (:mod:`~exp.qualify.judge`) and writes ``qualify.json`` and the page (:mod:`~exp.qualify.page`). Rows that no
other task makes are tasks, too, and can be run alone: :mod:`~exp.qualify.operators`, :mod:`~exp.qualify.collectives`
and :mod:`~exp.qualify.speed`; only these three import torch.
"""
