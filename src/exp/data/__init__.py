"""Data sets: the interface, samplers that shard samples over ranks, and loaders."""
