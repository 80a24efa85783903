"""Data-parallel training on a device that gloo cannot reach, for torch < 2.0, where no process group can be staged.

:class:`StagedDataParallel` stands in for torch's DDP: it averages the gradients itself, on the CPU.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from exp.engine.staged import copy_back, to_host

__all__ = ["StagedDataParallel"]


class StagedDataParallel(nn.Module):
    """Data-parallel training with gradients averaged on the CPU at the end of each backward pass.

    Args:
        module: on its device; parameters and buffers are made those of rank 0.
        bucket_cap_mb: largest piece that is exchanged at once, in MiB.
        broadcast_buffers: give every rank the buffers of rank 0 before the first forward pass of a step.
        device_ids: of DDP's interface; the module is where it is.
        output_device: of DDP's interface.
        find_unused_parameters: of DDP's interface; parameters without a gradient count as zero here in any case.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: int = 25,
        broadcast_buffers: bool = True,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self._capacity = bucket_cap_mb * 2**20
        self._parameters_to_train = [p for p in module.parameters() if p.requires_grad]
        self._synchronize = True
        self._exchange = True
        self._queued = False
        self._buffers_differ = True
        self._broadcast([*module.parameters(), *module.buffers()])
        for parameter in self._parameters_to_train:
            parameter.register_hook(self._on_gradient)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's."""
        if self.broadcast_buffers and self._buffers_differ:
            self._broadcast(list(self.module.buffers()))
        # As in DDP, the forward pass decides for its backward pass, which may run after `no_sync` has been left.
        if torch.is_grad_enabled():
            self._exchange, self._queued = self._synchronize, False
        # As in DDP: once per exchange of gradients, not once per micro-batch.
        self._buffers_differ = self._synchronize and torch.is_grad_enabled()
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them: those of forward passes within."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        if self._exchange and not self._queued:
            self._queued = True
            # Runs once this backward pass has put every gradient in place.
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        self._queued = False
        with torch.no_grad():
            for bucket in self._buckets():
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
                host = to_host(torch.cat([grad.reshape(-1) for grad in grads]))
                dist.all_reduce(host)
                mean = torch.empty(host.shape, dtype=host.dtype, device=grads[0].device)
                copy_back(host / dist.get_world_size(), mean)
                shares = mean.split([grad.numel() for grad in grads])
                for parameter, grad, share in zip(bucket, grads, shares):
                    grad.copy_(share.view_as(grad))
                    parameter.grad = grad

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        """Parameters of one type, up to the capacity, in the order in which every rank has them."""
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in self._parameters_to_train:
            more = parameter.numel() * parameter.element_size()
            if bucket and (size + more > self._capacity or parameter.dtype != bucket[0].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += more
        if bucket:
            yield bucket

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            host = to_host(tensor)
            dist.broadcast(host, 0)
            copy_back(host, tensor)
