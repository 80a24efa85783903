"""The training engine: MMEngine's Runner, on any backend."""
