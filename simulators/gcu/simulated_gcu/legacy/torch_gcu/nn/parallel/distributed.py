"""The vendor's DistributedDataParallel: its arguments and errors, and gradients averaged over the vendor's group."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from typing import Any, Iterable, Iterator, Sequence

import torch
from torch import distributed as torch_distributed
from torch import nn
from torch.distributed import ProcessGroup

import torch_gcu
from torch_gcu._device import AnyDevice, index_of
from torch_gcu.distributed._groups import default_group
from torch_gcu.nn.parallel import _replicas

__all__ = ["DistributedDataParallel"]

_MIB = 1 << 20
_BROADCAST_BUCKET = 1 << 30


class DistributedDataParallel(nn.Module):
    """Averages the gradients of a model over the ranks, in buckets, while the backward pass runs.

    Args:
        module: the model, on its card; parameters and persistent buffers become those of rank 0.
        device_ids: one card. None means ALL cards that the process sees (:mod:`torch_gcu.nn.parallel._replicas`).
        output_device: device of the outputs; None: the first of ``device_ids``.
        dim: axis along which batches are divided over several cards.
        broadcast_buffers: copy the buffers of rank 0 to all ranks before each forward pass.
        process_group: a group of :mod:`torch_gcu.distributed`; None: the default group.
        bucket_cap_mb: size of a gradient bucket, in MiB.
        find_unused_parameters: find parameters that a forward pass did not use, and do not wait for their gradients.
        check_reduction: without effect.
        gradient_as_bucket_view: refused.

    Raises:
        AssertionError: device arguments for a model on the CPU or on several cards, or nothing to train.
        RuntimeError: several ``device_ids``, or ``gradient_as_bucket_view``.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[AnyDevice] | None = None,
        output_device: AnyDevice = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 256,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        super().__init__()
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. "
                "Please avoid using it.",
                stacklevel=2,
            )
        _check_module(module)
        if device_ids is not None and len(device_ids) > 1:
            raise RuntimeError("device_ids can only be None or contain a single element.")
        self.device = next(module.parameters()).device
        self.device_ids: list[int] | None = None
        self.output_device: int | None = None
        devices = {parameter.device for parameter in module.parameters()}
        if self.device.type == "cpu" or len(devices) > 1:
            if device_ids or output_device:
                raise AssertionError(
                    "DistributedDataParallel device_ids and output_device arguments only work with single-device GPU "
                    f"modules, but got device_ids {device_ids}, output_device {output_device}, and module parameters "
                    f"{devices}."
                )
        else:
            cards = range(torch_gcu.device_count()) if device_ids is None else device_ids
            self.device_ids = [index_of(card, optional=True) for card in cards]
            self.output_device = self.device_ids[0] if output_device is None else index_of(output_device, optional=True)
        self.process_group = process_group if process_group is not None else default_group()
        if gradient_as_bucket_view and self.device.type == "xla":
            raise RuntimeError(
                "dtu not support `gradient_as_bucket_view` set to True, please set gradient_as_bucket_view to False"
            )
        self.dim = dim
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.require_backward_grad_sync = True
        self._sync_buffers_next = True
        self._bucket_bytes = int(bucket_cap_mb * _MIB)
        self._broadcast(list(module.state_dict().values()))
        self._replicas = [module]
        if self.device_ids and len(self.device_ids) > 1:
            warnings.warn(
                "Single-Process Multi-GPU is not the recommended mode for DDP: device_ids=None takes all cards of this "
                "process; pass device_ids=[local_rank]",
                stacklevel=2,
            )
            self._replicas = _replicas.replicate(module, self.device_ids)
        self.reducer = self._make_reducer()

    def _make_reducer(self) -> Any:
        """Torch's reducer, over the vendor's group."""
        owners = [(module, p) for module in self.module.modules() for p in module.parameters(recurse=False)]
        seen = set()
        parameters, sparse = [], []
        for owner, parameter in owners:
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                parameters.append(parameter)
                sparse.append(isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse)
        buckets, limits = torch_distributed._compute_bucket_assignment_by_size(
            parameters, [self._bucket_bytes, self._bucket_bytes], sparse
        )
        return torch_distributed.Reducer(
            [parameters],
            buckets[::-1],  # gradients arrive in about the reverse order of the parameters
            limits[::-1],
            self.process_group,
            [sparse],
            self._bucket_bytes,
            self.find_unused_parameters,
        )

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Copy the tensors of rank 0 to all ranks."""
        if tensors:
            torch_distributed._broadcast_coalesced(self.process_group, tensors, _BROADCAST_BUCKET, 0)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank; the first forward and backward pass after this context reduces them."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module on the card or cards of this rank, and prepare the reducer for the backward pass."""
        exchanges = torch.is_grad_enabled() and self.require_backward_grad_sync
        if exchanges:
            self.reducer.prepare_for_forward()
        if self._sync_buffers_next and self.broadcast_buffers:
            self._broadcast(list(self.module.buffers()))
        output = self._call_module(inputs, kwargs)
        if exchanges:
            self.reducer.prepare_for_backward(list(_tensors_in(output)) if self.find_unused_parameters else [])
        self._sync_buffers_next = exchanges
        return output

    def _call_module(self, inputs: Any, kwargs: Any) -> Any:
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        arguments = _replicas.scatter_arguments(inputs, kwargs, self.device_ids, self.dim)
        if len(self._replicas) == 1:
            inputs, kwargs = arguments[0]
            return self.module(*inputs, **kwargs)
        outputs = _replicas.run_replicas(self._replicas, arguments, self.device_ids)
        return _replicas.gather(outputs, torch.device("xla", self.output_device), self.dim)


def _check_module(module: nn.Module) -> None:
    assert any(parameter.requires_grad for parameter in module.parameters()), (
        "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
    )
    types = {parameter.device.type for parameter in module.parameters()}
    assert len(types) == 1, (
        "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
        f"locate in {types}."
    )


def _tensors_in(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return itertools.chain.from_iterable(map(_tensors_in, value))
