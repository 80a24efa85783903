"""Does a backend compute what another one does? The first steps of one experiment on both, and what differs.

The experiment is launched twice through the launcher of the run: on the backend under test, and on the reference. Each
leaves a trace (:mod:`~exp.parity.trace`); the parent compares them (:mod:`~exp.parity.compare`) and reports
(:mod:`~exp.parity.summary`). Two launches, because the plug-ins of two devices need not live in one process.
"""
