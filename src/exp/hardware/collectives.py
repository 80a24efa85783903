"""A hardware family's collectives: which process group, who makes it, and the DDP class that goes with it.

A part of the backend interface (:mod:`exp.hardware.backend`), on a page of its own because most backends write one
line of it.
"""

from __future__ import annotations

import abc
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch.distributed import Store

__all__ = ["Collectives"]


class Collectives(abc.ABC):
    """What a backend inherits; called in a worker, after the device has been selected."""

    device_type: str
    requested_process_group: str | None
    staged: bool
    """Whether the device's tensors go through the CPU."""

    reduces_means: bool = False
    """Whether the process group itself takes means over ranks, not only sums."""

    @property
    @abc.abstractmethod
    def default_process_group(self) -> str:
        """``@plugin-dev`` what torch >= 2.0 is given, CPU tensors included, such as ``"cpu:gloo,<device>:<lib>"``."""

    @property
    def process_group(self) -> str:
        """The process-group backend of this run: config, then ``TORCH_DISTRIBUTED_BACKEND``, then the default."""
        return self.requested_process_group or os.environ.get("TORCH_DISTRIBUTED_BACKEND") or self.default_process_group

    @property
    def process_group_source(self) -> str:
        """Where :attr:`process_group` comes from, for messages."""
        if self.requested_process_group:
            return "backend.process_group"
        return "TORCH_DISTRIBUTED_BACKEND" if os.environ.get("TORCH_DISTRIBUTED_BACKEND") else "the backend"

    def collectives_missing(self) -> str | None:
        """Why the device's own collectives cannot be used in this process, or None; asked after :meth:`set_device`."""
        return None

    def init_process_group(self, *, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        """Make the default process group over ``store``.

        Below torch 2.0 composite strings such as ``"cpu:gloo,x:y"`` are refused by torch: there the default group takes
        the device's part, and :class:`exp.engine.distributed.Distributed` makes a gloo group for CPU tensors beside it.
        """
        import torch.distributed as dist

        from exp.hardware.compat import device_part_of, supports_composite_process_groups

        name = self.process_group
        if not supports_composite_process_groups():
            name = device_part_of(name, self.device_type)
        dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=timeout)

    def init_staged_process_group(self, *, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        """Make a process group that carries this device's tensors over gloo, by copies through the CPU."""
        from exp.engine.staged import init_staged_process_group

        self.staged = True
        init_staged_process_group(self.device_type, store, rank, world_size, timeout)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up a tensor on this device over all ranks, in place, with the collectives that gradients use."""
        import torch.distributed as dist

        from exp.hardware.compat import supports_python_process_groups

        if self.staged and not supports_python_process_groups():
            host = tensor.cpu()
            dist.all_reduce(host)
            tensor.copy_(host)
        else:
            dist.all_reduce(tensor)

    def destroy_process_group(self) -> None:
        """Take the default process group down."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def ddp_kwargs(self, device: torch.device) -> dict[str, Any]:
        """The device arguments of the DDP wrapper; the only place that they come from."""
        return {"device_ids": [device.index], "output_device": device.index}

    @property
    def ddp_class(self) -> type:
        """The DistributedDataParallel class: torch's own, unless the vendor has one, or the group cannot be torch's."""
        from torch.nn.parallel import DistributedDataParallel

        from exp.hardware.compat import supports_python_process_groups

        if self.staged and not supports_python_process_groups():
            from exp.engine.staged_ddp import StagedDataParallel

            return StagedDataParallel
        return DistributedDataParallel
