"""Runs as jobs of Slurm: submitted, and followed to their end."""
