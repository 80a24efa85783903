"""The worker: what one rank does, from its start to its exit."""
