"""The vendor's modules: its DistributedDataParallel."""

from torch_gcu.nn import parallel

__all__ = ["parallel"]
