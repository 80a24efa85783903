"""Checkpoints of a training: their files, what is saved when, and how a run resumes."""
