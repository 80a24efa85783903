"""The training engine, on any backend."""
