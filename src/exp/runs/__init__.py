"""The files of a run: its folder, lock, records and heartbeats."""
