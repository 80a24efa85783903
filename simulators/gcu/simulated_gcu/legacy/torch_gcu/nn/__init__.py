"""Modules of the vendor's: its data-parallel wrapper."""

from torch_gcu.nn import parallel

__all__ = ["parallel"]
