"""How the ranks of a hardware family exchange tensors: process group, all-reduce, and the DDP class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch.distributed import Store

__all__ = ["Collectives", "ddp_arguments", "device_part_of"]


class Collectives:
    """Collectives of ``torch.distributed``; a vendor whose package has its own collectives derives a class.

    Args:
        process_group: backend string for torch >= 2.0, CPU tensors included: ``"cpu:gloo,<device>:<library>"``.
        averages: whether the process group supports ``ReduceOp.AVG``.
        gloo: whether gloo accepts tensors on this device. Otherwise they are copied through the CPU.
    """

    def __init__(self, process_group: str, averages: bool = False, gloo: bool = False) -> None:
        self.process_group = process_group
        self.averages = averages
        self.gloo = gloo

    def missing(self, process_group: str, device_type: str) -> str | None:
        """Why this process cannot use the collectives on its device, or None; called after the device was selected.

        Args:
            process_group: the chosen backend string.
            device_type: torch's device type.
        """
        import torch.distributed as dist

        library = device_part_of(process_group, device_type)
        known = getattr(dist, "is_backend_available", None)  # torch >= 2.0
        if known is None or (library != "undefined" and known(library)):
            return None
        return f"no package has registered collectives for {device_type} with torch ({library})"

    def init(self, process_group: str, device_type: str, *, store: Store, rank: int, world_size: int,
             timeout: timedelta) -> None:  # fmt: skip
        """Make the default process group over ``store``.

        torch < 2.0 refuses composite strings such as ``"cpu:gloo,x:y"``. There the default group uses only the device's
        backend, and :class:`exp.engine.distributed.Distributed` makes a second group with gloo for CPU tensors.
        """
        import torch.distributed as dist

        from exp.hardware.compat import supports_composite_groups

        if not supports_composite_groups():
            process_group = device_part_of(process_group, device_type)
        dist.init_process_group(process_group, store=store, rank=rank, world_size=world_size, timeout=timeout)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor on this device over all ranks, in place, with the collectives that DDP uses for gradients."""
        import torch.distributed as dist

        dist.all_reduce(tensor)

    def destroy(self) -> None:
        """Destroy the default process group."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def ddp_class(self) -> type:
        """The DistributedDataParallel class: torch's own, unless the vendor has one."""
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel


def device_part_of(process_group: str, device_type: str) -> str:
    """The backend of ``device_type`` in a composite string: ``("cpu:gloo,x:y", "x") -> "y"``."""
    if ":" not in process_group:
        return process_group
    parts = dict(part.split(":", 1) for part in process_group.split(","))
    return parts.get(device_type) or parts["cpu"]


def ddp_arguments(device: torch.device) -> dict[str, Any]:
    """DDP arguments that name the model's card, if it has an index; without them some vendors' DDP takes all cards."""
    return {} if device.index is None else {"device_ids": [device.index], "output_device": device.index}
