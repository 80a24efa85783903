"""Does this hardware compute right, and together? Checks, each with an answer: ok, warning, failed or skipped.

``task=doctor``: each rank makes its checks (:mod:`~exp.checks.doctor`) on a bench (:mod:`~exp.checks.bench`), and keeps
a journal as it goes (:mod:`~exp.checks.check`). The parent reads the journals when the launch has ended
(:mod:`~exp.checks.verdict`, :mod:`~exp.checks.report`): it survives whatever happens to the ranks, and needs no torch.
"""
