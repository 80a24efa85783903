"""Trackers: where people look at a run beside its folder.

Each follows the run folder in a process of its own (:mod:`exp.trackers.follow`), which the process that launches the
run starts and waits for (:mod:`exp.trackers.following`). So nothing of a tracker is in the training: not its import,
not its threads, not its server that does not answer; and a run can be handed to it afterwards, too (``task=track``).
"""

from exp.trackers.base import TrackedRun, Tracker

__all__ = ["TrackedRun", "Tracker"]
