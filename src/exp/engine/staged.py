"""Gradients of tensors on a device that the process group's library cannot reach: copies through the CPU, over gloo.

The only honest way to run "gloo on such a card". It is slow, so it is used only where the configuration asks for it or
permits it, it says so on every rank, and it counts the bytes that it copies. Gradients go this way, and sums of
tensors; nothing else of ``torch.distributed`` takes the device's tensors then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import torch
import torch.distributed as dist
from torch import nn

from exp.hardware.collectives import Collectives

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["StagedCollectives", "StagedDataParallel", "staged_bytes"]


class _Counter:
    """Bytes copied between device and CPU by this process."""

    total = 0


def staged_bytes() -> int:
    """Bytes that this process has copied between its device and the CPU for collectives, both ways together."""
    return _Counter.total


@torch.no_grad()
def _all_reduce(tensor: torch.Tensor) -> None:
    """Add up a tensor of any device over all ranks, in place."""
    if tensor.device.type == "cpu":
        dist.all_reduce(tensor)
        return
    host = tensor.detach().to("cpu", copy=True).contiguous()
    dist.all_reduce(host)
    tensor.copy_(host)
    _Counter.total += 2 * tensor.numel() * tensor.element_size()


class StagedCollectives(Collectives):
    """Sums by copies through the CPU. The default process group is gloo, and carries CPU tensors."""

    only_sums = True

    def __init__(self) -> None:
        super().__init__("gloo")

    def init(
        self, process_group: str, device_type: str, *, store: dist.Store, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        """Make the default process group."""
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all ranks, in place."""
        _all_reduce(tensor)

    @property
    def ddp_class(self) -> type:
        """The wrapper that averages the gradients itself."""
        return StagedDataParallel


class StagedDataParallel(nn.Module):
    """Data-parallel training with gradients averaged on the CPU, one parameter after another, before each update.

    Args:
        module: on its device; parameters and buffers are made those of rank 0.
        broadcast_buffers: give every rank the buffers of rank 0 before the first forward pass of a step.
        **_: other options of DDP, which make no difference here: parameters without a gradient count as zero.
    """

    def __init__(self, module: nn.Module, broadcast_buffers: bool = True, **_: Any) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self._step_begins = False
        self._broadcast([*module.parameters(), *module.buffers()])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's."""
        if self.broadcast_buffers and self._step_begins:
            self._broadcast(list(self.module.buffers()))
        self._step_begins = False
        return self.module(*inputs, **kwargs)

    @torch.no_grad()
    def exchange_gradients(self) -> None:
        """Average the gradients over all ranks; called once all those of a step are in place."""
        self._step_begins = True
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                _all_reduce(parameter.grad)
                parameter.grad.div_(dist.get_world_size())

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            host = tensor.detach().to("cpu", copy=True).contiguous()
            dist.broadcast(host, 0)
            tensor.copy_(host)
            _Counter.total += 2 * tensor.numel() * tensor.element_size() * (tensor.device.type != "cpu")
