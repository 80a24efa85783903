"""Starts and supervises the workers of a run. The parent process does not import torch."""
