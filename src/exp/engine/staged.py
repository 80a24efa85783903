"""Collectives for tensors on a device that the process group's library cannot reach: copies through the CPU, over gloo.

The only honest way to run "gloo on such a card". It is slow, so it is used only where the configuration asks for it or
permits it, it says so on every rank, and it counts the bytes that it copies.

:class:`StagedProcessGroup` is a process group like any other: torch >= 2.0 lets one be written in Python. Older torch
does not; there a wrapper averages the gradients itself (:mod:`exp.engine.staged_ddp`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator

import torch
import torch.distributed as dist
from torch.futures import Future

from exp.hardware.collectives import Collectives
from exp.hardware.compat import supports_python_process_groups

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["NAME", "StagedCollectives", "StagedProcessGroup", "copy_back", "staged_bytes", "to_host"]

NAME = "staged"
"""What ``torch.distributed`` calls the group."""


class _Counter:
    """Bytes copied between device and CPU by this process."""

    total = 0


def staged_bytes() -> int:
    """Bytes that this process has copied between its device and the CPU for collectives, both ways together."""
    return _Counter.total


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; a CPU tensor is used as it is."""
    if tensor.device.type == "cpu":
        return tensor
    _Counter.total += tensor.numel() * tensor.element_size()
    return tensor.detach().to("cpu", copy=True).contiguous()


def copy_back(host: torch.Tensor, tensor: torch.Tensor) -> None:
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
    return to_host(tensors) if isinstance(tensors, torch.Tensor) else [_map(item) for item in tensors]


_ProcessGroup: Any = dist.ProcessGroup  # its type stubs differ from one torch to the next


class StagedProcessGroup(_ProcessGroup):
    """A process group over gloo that takes tensors of any device.

    Every collective is finished when its call returns: the copies back need the result anyway, and a fallback should be
    simple before it is fast. Collectives that gloo does not have raise gloo's own error.

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
                    copy_back(value, tensor)
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

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Give the root the tensors of all."""
        return self._run("gather", outputs, outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Give each rank its tensor of the root's."""
        return self._run("scatter", outputs, outputs, inputs, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Give each rank its share of the reduction: gloo lacks it, so all is reduced and the share is kept."""
        for output, parts in zip(outputs, inputs):
            whole = torch.stack([to_host(part).reshape(output.shape) for part in parts])
            self._gloo.allreduce([whole], _sum_like(opts)).wait()
            copy_back(whole[self.rank()], output)
        return _done(outputs)

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any) -> Any:
        """Give each rank its share of the reduction of one tensor."""
        return self.reduce_scatter([output], [list(tensor.view(self.size(), *output.shape).unbind(0))], opts)

    def alltoall_base(self, output: Any, tensor: Any, out_sizes: Any, in_sizes: Any, opts: Any) -> Any:
        """Exchange shares of one tensor."""
        return self._run("alltoall_base", output, output, tensor, out_sizes, in_sizes)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Exchange one tensor with each rank: gloo exchanges shares of one tensor, so they are put together first."""
        sent = torch.cat([to_host(tensor).reshape(-1) for tensor in inputs])
        sizes = [tensor.numel() for tensor in outputs]
        received = torch.empty(sum(sizes), dtype=sent.dtype)
        self._gloo.alltoall_base(received, sent, sizes, [tensor.numel() for tensor in inputs]).wait()
        for output, share in zip(outputs, received.split(sizes)):
            copy_back(share.view_as(output), output)
        return _done(outputs)

    # What recent torch calls them.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        """Send one tensor."""
        return self._run("send", None, tensors, destination, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        """Receive one tensor."""
        return self._run("recv", tensors, tensors, source, tag)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        self._gloo.barrier().wait()
        return _done([])


def _is_tensors(argument: Any) -> bool:
    """Tensors, or lists of them, as opposed to options, ranks and sizes."""
    if isinstance(argument, (list, tuple)):
        return bool(argument) and _is_tensors(argument[0])
    return isinstance(argument, torch.Tensor)


def _sum_like(options: Any) -> Any:
    reduce = dist.AllreduceOptions()
    reduce.reduceOp = options.reduceOp
    return reduce


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
        from exp.engine.staged_ddp import StagedDataParallel  # which imports this module

        return StagedDataParallel
