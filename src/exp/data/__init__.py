"""Data sets: read from disk, cut into samples, and sharded over ranks."""
