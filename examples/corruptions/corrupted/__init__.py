"""Weights, tested on corrupted inputs."""
