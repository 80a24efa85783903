"""Trackers: where people look at a run beside its folder.

Rank 0 hands figures to each tracker in a thread of its own (:mod:`exp.trackers.reporting`), so that no step waits for
a server. A run that is over can be handed to a tracker, too (``task=track``).
"""

from exp.trackers.base import TrackedRun, Tracker

__all__ = ["TrackedRun", "Tracker"]
