"""The process group for the engine: rank, world size, and collectives for small CPU values.

The DDP wrapper exchanges the gradients. All other values that ranks exchange (metrics, random states, errors) are small
CPU values. They use a process group that supports CPU tensors, never that of the device.

If the device's own collectives are missing, gradients and sums are copied to the CPU and exchanged over gloo; this is
called staging. Other functions of ``torch.distributed`` do not accept tensors of the device then. Staging is slow, so
it is used only if the configuration asks for it or allows it. Every rank logs it, and counts the copied bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from exp.errors import ExpError, UnavailableError
from exp.hardware.backend import Collectives, device_part_of

if TYPE_CHECKING:
    from torch.distributed import Store

    from exp.hardware.backend import Backend

__all__ = [
    "STAGED", "Distributed", "StagedCollectives", "StagedDataParallel", "agree_on_fallback", "chosen_group",
    "staged_bytes",
]  # fmt: skip

STAGED = "gloo, staged through the CPU"
"""Name of the fallback in messages and records."""


@dataclass(eq=False)
class Distributed:
    """Rank, world size, and collectives for CPU values, which do nothing if there is one process."""

    rank: int = 0
    """Global rank of this process."""
    world_size: int = 1
    """Number of processes."""
    cpu_group: Any = None
    """The process group for CPU tensors; None: the default group."""
    fallback: dict[str, Any] | None = None
    """Result of :func:`agree_on_fallback`."""
    process_group: str = "none"
    """Name of the process-group backend for the device's tensors, for messages and records."""

    @classmethod
    def create(cls, backend: Backend, store: Store, rank: int, world_size: int, timeout: timedelta) -> Distributed:
        """Make the process group of ``backend`` and, if it does not support CPU tensors, a gloo group.

        Args:
            backend: the backend of this worker; its ``collectives`` are replaced if the fallback is used.
            store: key-value store that all ranks can reach.
            rank: global rank of this process.
            world_size: number of processes.
            timeout: of all collectives.

        Raises:
            UnavailableError: the device's collectives are missing on a rank, and no fallback is allowed.
        """
        fallback = agree_on_fallback(backend, store, rank, world_size)
        process_group, _ = chosen_group(backend)
        if fallback is not None:
            backend.collectives, process_group = StagedCollectives(), STAGED
        how: Any = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
        backend.collectives.init(process_group, backend.device_type, **how)
        group = None
        if not dist.is_initialized():
            # The vendor has its own collectives, outside torch.distributed; CPU values use gloo.
            dist.init_process_group("gloo", **how)
        elif fallback is None and dist.get_backend() != "gloo" and not _composite_has_cpu():
            group = dist.new_group(backend="gloo", timeout=timeout)
        return cls(rank, world_size, group, fallback, process_group)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Add up a CPU tensor over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(value, group=self.cpu_group)
        return value

    def gather(self, value: Any) -> list[Any]:
        """Collect ``value`` of every rank, by rank; small picklable objects only."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.cpu_group)
        return gathered

    def on_main(self, function: Callable[[], object]) -> None:
        """Call a function on rank 0. If it raises an ExpError, every rank raises it, so that none waits. A collective.

        Raises:
            ExpError: the error of the function.
        """
        trouble = None
        try:
            if self.is_main:
                function()
        except ExpError as error:
            trouble = error
        trouble = self.gather(trouble)[0]
        if trouble is not None:
            raise trouble

    def barrier(self) -> None:
        """Wait for all ranks. An all-reduce, because torch's own barrier may pick a wrong device."""
        self.sum(torch.zeros(1))


def chosen_group(backend: Backend) -> tuple[str, str]:
    """The process-group backend of this run, and its source.

    The first that is set: ``backend.process_group``, the variable ``TORCH_DISTRIBUTED_BACKEND``, the backend's default.

    Returns:
        The name, such as ``gloo``, and the source as text for messages.
    """
    variable = "TORCH_DISTRIBUTED_BACKEND"
    if backend.requested_process_group:
        return backend.requested_process_group, "backend.process_group"
    if os.environ.get(variable):
        return os.environ[variable], variable
    return backend.collectives.process_group, "the backend"


def agree_on_fallback(backend: Backend, store: Store, rank: int, world_size: int) -> dict[str, Any] | None:
    """Decide before any process group is made, and alike on all ranks, whether device tensors go through the CPU.

    They do if the configuration (or ``TORCH_DISTRIBUTED_BACKEND``) names gloo, and gloo does not support the device;
    and, with ``backend.allow_fallback``, if the device's own collectives are missing on a rank.

    Args:
        backend: the backend of this worker.
        store: key-value store that all ranks can reach.
        rank: global rank of this process.
        world_size: number of processes.

    Returns:
        ``{"wanted", "used", "reason"}``, the same on every rank; None: no fallback.

    Raises:
        UnavailableError: the collectives are missing on a rank, and no fallback is allowed; raised on every rank.
    """
    wanted, source = chosen_group(backend)
    if backend.device_type == "cpu" or backend.collectives.gloo:
        return None
    if device_part_of(wanted, backend.device_type) == "gloo":
        used = {"wanted": backend.collectives.process_group, "used": STAGED}
        return {**used, "reason": f"{source} names {wanted}"}
    store.set(f"collectives/{rank}", backend.collectives.missing(wanted, backend.device_type) or "")
    verdicts = [store.get(f"collectives/{other}").decode() for other in range(world_size)]
    missing = [f"rank {other}: {verdict}" for other, verdict in enumerate(verdicts) if verdict]
    if not missing:
        return None
    if not backend.allow_fallback:
        raise UnavailableError(
            f"process group '{wanted}' cannot be made: {missing[0]}; install what is missing, or copy tensors through "
            "the CPU, which is slow, with backend.allow_fallback=true or backend.process_group=gloo"
        )
    return {"wanted": wanted, "used": STAGED, "reason": "; ".join(missing)}


def _composite_has_cpu() -> bool:
    """Whether the default process group also has a backend for CPU tensors (torch 2.0 and later)."""
    if "cpu:gloo" in dist.get_backend():
        return True
    config = getattr(dist, "get_backend_config", None)
    return config is not None and "cpu:gloo" in str(config())


_staged = {"bytes": 0}


def staged_bytes() -> int:
    """Bytes that this process has copied for collectives from its device to the CPU and back."""
    return _staged["bytes"]


@torch.no_grad()
def _through_cpu(tensor: torch.Tensor, collective: Callable[..., object], **options: Any) -> None:
    """Run a collective on a CPU copy of a tensor of any device, and copy the result back."""
    host = tensor.detach().to("cpu", copy=True).contiguous()
    collective(host, **options)
    tensor.copy_(host)
    _staged["bytes"] += 2 * tensor.numel() * tensor.element_size() * (tensor.device.type != "cpu")


class StagedCollectives(Collectives):
    """Collectives that copy tensors through the CPU; the default process group is gloo."""

    def __init__(self) -> None:
        super().__init__("gloo")

    def init(
        self, process_group: str, device_type: str, *, store: dist.Store, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        """Make the default process group."""
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all ranks, in place."""
        _through_cpu(tensor, dist.all_reduce)

    @property
    def ddp_class(self) -> type:
        """:class:`StagedDataParallel`."""
        return StagedDataParallel


class StagedDataParallel(nn.Module):
    """Data-parallel training that averages gradients on the CPU, one parameter after another, before each update.

    A parameter without a gradient counts as zero.

    Args:
        module: the model on its device; its parameters and buffers are overwritten by those of rank 0.
        broadcast_buffers: copy the buffers of rank 0 to every rank before the first forward pass of a step.
        **_: other options of DDP, which are ignored.
    """

    def __init__(self, module: nn.Module, broadcast_buffers: bool = True, **_: Any) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self._step_begins = False
        self._broadcast([*module.parameters(), *module.buffers()])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, after the exchange of buffers in the first forward pass of a step."""
        if self.broadcast_buffers and self._step_begins:
            self._broadcast(self.module.buffers())
        self._step_begins = False
        return self.module(*inputs, **kwargs)

    @torch.no_grad()
    def exchange_gradients(self) -> None:
        """Average the gradients over all ranks, in place; called after the last backward pass of a step."""
        self._step_begins = True
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                _through_cpu(parameter.grad, dist.all_reduce)
                parameter.grad.div_(dist.get_world_size())

    def _broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            _through_cpu(tensor, dist.broadcast, src=0)
