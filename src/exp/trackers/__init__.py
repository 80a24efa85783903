"""Experiment trackers: the interface, and the clients."""
