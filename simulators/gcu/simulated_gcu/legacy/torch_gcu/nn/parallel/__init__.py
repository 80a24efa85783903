"""The vendor's own DistributedDataParallel."""

from torch_gcu.nn.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
