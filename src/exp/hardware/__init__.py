"""Hardware: the backend interface, the registry of backends, and facts about cores and cards."""
