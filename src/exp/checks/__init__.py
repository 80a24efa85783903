"""Does this hardware compute right, and together? Checks, each with an answer: ok, warning, failed or skipped, and why.

What a process knows is in its journal at any moment, and each check has a limit of time (:mod:`~exp.checks.check`); the
parent reads the journals when the process has ended. It survives whatever happens to cards, and needs no torch.

- ``task=doctor``: each rank makes its checks; the parent judges and shows them (:mod:`~exp.checks.doctor`).
- ``task=operators`` and ``task=collectives``: the ranks compare (:mod:`~exp.checks.operators`,
  :mod:`~exp.checks.measure`), and the parent judges (:mod:`~exp.checks.check`).
- ``task=parity``: two runs that leave traces (:mod:`~exp.checks.measure`), which are compared
  (:mod:`~exp.checks.parity`).
- ``task=qualify``: all of them and ``task=speed``, each in a process of its own (:mod:`~exp.checks.child`), with one
  record and one page (:mod:`~exp.checks.suite`).
"""
