"""Collectives for tensors on a device that the process group's library cannot reach: copies through the CPU, over gloo.

The only honest way to run "gloo on such a card". It is slow, so it is used only where the configuration asks for it or
permits it, it says so on every rank, and it counts the bytes that it copies.

:class:`StagedProcessGroup` is a process group like any other: torch >= 2.0 lets one be written in Python. Older torch
does not; there :class:`StagedDataParallel` stands in for DDP, and averages the gradients itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from exp.hardware.collectives import Collectives
from exp.hardware.compat import supports_python_process_groups

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["NAME", "StagedCollectives", "StagedDataParallel", "StagedProcessGroup", "staged_bytes"]

NAME = "staged"
"""What ``torch.distributed`` calls the group."""


class _Counter:
    """Bytes copied between device and CPU by this process."""

    total = 0


def staged_bytes() -> int:
    """Bytes that this process has copied between its device and the CPU for collectives, both ways together."""
    return _Counter.total


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; a CPU tensor is used as it is."""
    if tensor.device.type == "cpu":
        return tensor
    _Counter.total += tensor.numel() * tensor.element_size()
    return tensor.detach().to("cpu", copy=True).contiguous()


def _copy_back(host: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a result to where its owner wants it."""
    if host is not tensor:
        _Counter.total += tensor.numel() * tensor.element_size()
        with torch.no_grad():
            tensor.copy_(host)


def _flat(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for item in tensors:
            yield from _flat(item)


def _map(tensors: Any) -> Any:
    return _to_host(tensors) if isinstance(tensors, torch.Tensor) else [_map(item) for item in tensors]


_ProcessGroup: Any = dist.ProcessGroup  # its type stubs differ from one torch to the next


class StagedProcessGroup(_ProcessGroup):
    """A process group over gloo that takes tensors of any device.

    Every collective is finished when its call returns: the copies back need the result anyway, and a fallback should be
    simple before it is fast. It has those that trainings and metrics use; torch refuses the others by name.

    Args:
        store: where the ranks meet.
        rank: of this process.
        size: number of processes.
        timeout: of each collective.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """For torch's messages."""
        return NAME

    def _run(self, name: str, results: Any, *arguments: Any) -> Any:
        """Run gloo's collective ``name`` on host copies of ``arguments``; copy back those of ``results``."""
        hosts = [_map(argument) if _is_tensors(argument) else argument for argument in arguments]
        getattr(self._gloo, name)(*hosts).wait()
        for argument, host in zip(arguments, hosts):
            if argument is results:
                for tensor, value in zip(_flat(argument), _flat(host)):
                    _copy_back(value, tensor)
        return _done(results)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce ``tensors`` (one) over all ranks, in place; the average, which gloo lacks, is a sum divided."""
        options = opts if opts is not None else dist.AllreduceOptions()
        average = options.reduceOp == dist.ReduceOp.AVG
        if average:
            options.reduceOp = dist.ReduceOp.SUM
        work = self._run("allreduce", tensors, tensors, options)
        if average:
            for tensor in _flat(tensors):
                tensor.div_(self.size())
        return work

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        """Reduce several tensors, in place."""
        for tensor in tensors:
            options = dist.AllreduceOptions()
            options.reduceOp = opts.reduceOp
            self.allreduce([tensor], options)
        return _done(tensors)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Give every rank the root's tensor."""
        return self._run("broadcast", tensors, tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Reduce to the root."""
        return self._run("reduce", tensors, tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Give every rank the tensors of all."""
        return self._run("allgather", outputs, outputs, inputs)

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        """Give every rank one tensor that holds those of all."""
        return self.allgather([list(output.view(self.size(), *tensor.shape).unbind(0))], [tensor])

    all_gather_single = _allgather_base  # what recent torch calls it

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        self._gloo.barrier().wait()
        return _done([])


def _is_tensors(argument: Any) -> bool:
    """Tensors, or lists of them, as opposed to options, ranks and sizes."""
    if isinstance(argument, (list, tuple)):
        return bool(argument) and _is_tensors(argument[0])
    return isinstance(argument, torch.Tensor)


def _done(result: Any) -> Any:
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    future: Future[Any] = Future()
    future.set_result([] if result is None else list(_flat(result)))
    return _create_work_from_future(future)


class StagedCollectives(Collectives):
    """Collectives by copies through the CPU; on torch < 2.0 the group is gloo, and the copies are made here."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.only_sums = not supports_python_process_groups()

    def init(
        self, process_group: str, device_type: str, *, store: dist.Store, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        """Make the default process group a staged one; on torch < 2.0 it is gloo."""
        name = "gloo"
        if supports_python_process_groups():
            name = NAME
            if not hasattr(dist.Backend, NAME.upper()):
                dist.Backend.register_backend(NAME, StagedProcessGroup, devices=["cpu", device_type])
        dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=timeout)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all ranks, in place."""
        if self.only_sums:
            host = tensor.cpu()
            super().all_reduce(host)
            tensor.copy_(host)
        else:
            super().all_reduce(tensor)

    @property
    def ddp_class(self) -> type:
        """The wrapper that averages the gradients itself where no process group can."""
        if not self.only_sums:
            return super().ddp_class
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
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                host = _to_host(gradient)
                dist.all_reduce(host)
                _copy_back(host.div_(dist.get_world_size()), gradient)
                parameter.grad = gradient

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            host = _to_host(tensor)
            dist.broadcast(host, 0)
            _copy_back(host, tensor)
