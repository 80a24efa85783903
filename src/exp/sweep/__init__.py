"""Sweeps: the jobs of one command line, frozen first, then run side by side or as a Slurm job array."""
