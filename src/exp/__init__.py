"""exp: the same PyTorch experiments, unchanged, on different accelerators."""

__version__ = "0.1.0"
