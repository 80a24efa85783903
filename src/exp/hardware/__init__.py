"""Hardware: the backend interface, where to find backends, and what a process learns of cores and cards."""
