"""The process group as the engine uses it: rank, world size and collectives for small CPU values.

Gradients travel through the DDP wrapper. Everything else that ranks must agree on (metrics, random states, errors) is
small and lives on the CPU: it goes over a group that is known to carry CPU tensors, never over the device's own.

Where the process group's library cannot reach a device, gradients and sums go through the CPU, over gloo; nothing else
of ``torch.distributed`` takes the device's tensors then. This is slow: it is used only where the configuration asks for
it or permits it. Every rank says so, and the bytes are counted.
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
from exp.hardware.collectives import Collectives, device_part_of

if TYPE_CHECKING:
    from torch.distributed import Store

    from exp.hardware.backend import Backend

__all__ = [
    "STAGED", "Distributed", "StagedCollectives", "StagedDataParallel", "agree_on_fallback", "chosen_group",
    "staged_bytes",
]  # fmt: skip

STAGED = "gloo, staged through the CPU"
"""How the fallback is called in messages and records."""


@dataclass(eq=False)
class Distributed:
    """Rank, world size, and collectives over CPU values; with one process each is the identity."""

    rank: int = 0
    """Global."""
    world_size: int = 1
    """Number of processes."""
    cpu_group: Any = None
    """The group that carries CPU tensors; None: the default group does."""
    fallback: dict[str, Any] | None = None
    """What :func:`agree_on_fallback` gave."""
    process_group: str = "none"
    """What carries the device's tensors, for messages and records."""

    @classmethod
    def create(cls, backend: Backend, store: Store, rank: int, world_size: int, timeout: timedelta) -> Distributed:
        """Make the process group of ``backend``, and a gloo group beside it where CPU tensors need one.

        Raises:
            UnavailableError: a rank lacks its device's collectives, and no fallback is allowed.
        """
        fallback = agree_on_fallback(backend, store, rank, world_size)
        process_group, _ = chosen_group(backend)
        if fallback is not None:
            backend.collectives, process_group = StagedCollectives(), STAGED
        how: Any = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
        backend.collectives.init(process_group, backend.device_type, **how)
        group = None
        if not dist.is_initialized():
            # A vendor with collectives of its own: CPU values still go over torch's gloo.
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
        """Call a function on rank 0. What it refuses, every rank raises: none goes on and waits for the others.

        Raises:
            ExpError: as the function raised it.
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
        """Wait for all ranks: an all-reduce, because torch's own guesses a device and may pick the wrong one."""
        self.sum(torch.zeros(1))


def chosen_group(backend: Backend) -> tuple[str, str]:
    """The process group of this run, by config, then ``TORCH_DISTRIBUTED_BACKEND``, then the backend; and by which."""
    variable = "TORCH_DISTRIBUTED_BACKEND"
    if backend.requested_process_group:
        return backend.requested_process_group, "backend.process_group"
    if os.environ.get(variable):
        return os.environ[variable], variable
    return backend.collectives.process_group, "the backend"


def agree_on_fallback(backend: Backend, store: Store, rank: int, world_size: int) -> dict[str, Any] | None:
    """Decide once, before any group is made and for all ranks alike, whether device tensors go through the CPU.

    They do where the configuration (or TORCH_DISTRIBUTED_BACKEND) names gloo, which cannot carry them; and, with
    ``backend.allow_fallback``, where some rank lacks the collectives of its device.

    Returns:
        None: no. Else ``{"wanted", "used", "reason"}``, the same on every rank.

    Raises:
        UnavailableError: a rank lacks them, and the configuration allows no fallback; every rank raises the same.
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
            f"process group '{wanted}' cannot be made: {missing[0]}; install what is missing, or let tensors go "
            "through the CPU, slowly: backend.allow_fallback=true, or backend.process_group=gloo"
        )
    return {"wanted": wanted, "used": STAGED, "reason": "; ".join(missing)}


def _composite_has_cpu() -> bool:
    """Whether the default group of torch >= 2.0 has a backend for CPU tensors."""
    if "cpu:gloo" in dist.get_backend():
        return True
    config = getattr(dist, "get_backend_config", None)
    return config is not None and "cpu:gloo" in str(config())


_staged = {"bytes": 0}


def staged_bytes() -> int:
    """Bytes that this process has copied between its device and the CPU for collectives, both ways together."""
    return _staged["bytes"]


@torch.no_grad()
def _through_cpu(tensor: torch.Tensor, collective: Callable[..., object], **options: Any) -> None:
    """Do a collective on a copy of a tensor of any device, in place."""
    host = tensor.detach().to("cpu", copy=True).contiguous()
    collective(host, **options)
    tensor.copy_(host)
    _staged["bytes"] += 2 * tensor.numel() * tensor.element_size() * (tensor.device.type != "cpu")


class StagedCollectives(Collectives):
    """Sums by copies through the CPU. The default process group is gloo, and carries CPU tensors."""

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
            self._broadcast(self.module.buffers())
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
                _through_cpu(parameter.grad, dist.all_reduce)
                parameter.grad.div_(dist.get_world_size())

    def _broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            _through_cpu(tensor, dist.broadcast, src=0)
