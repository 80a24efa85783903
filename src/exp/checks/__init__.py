"""Hardware checks: do the cards compute correctly, and do they work together?

Each check has a result: ok, warning, failed or skipped, with the reason. A worker writes each result to its journal at
once, and each check has a time limit (:mod:`~exp.checks.check`). The parent reads the journals after the workers have
ended. It imports no torch, so a failure of a card cannot end it.

- ``task=doctor``: each rank runs its checks (:mod:`~exp.checks.doctor`); the parent evaluates and prints them
  (:mod:`~exp.checks.diagnosis`). ``task=env`` describes the machine (:mod:`~exp.checks.machine`).
- ``task=operators`` and ``task=collectives``: the ranks compare values (:mod:`~exp.checks.operators`,
  :mod:`~exp.checks.measure`); the parent evaluates the results (:mod:`~exp.checks.check`).
- ``task=parity``: two runs write traces (:mod:`~exp.checks.measure`); the parent compares these
  (:mod:`~exp.checks.parity`).
- ``task=qualify``: all of the above and ``task=speed``, each in its own process (:mod:`~exp.checks.child`), with one
  JSON record and one Markdown page (:mod:`~exp.checks.suite`).
"""
