"""The vendor's collectives, over tensors on this rank's card."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.distributed import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed import ReduceOp as TorchReduceOp

from torch_gcu import _C
from torch_gcu.distributed._groups import GroupMember, default_group, get_rank, group_and_rank

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]


class ReduceOp(enum.Enum):
    """Reduction operators; the vendor's own class, so that torch's members of the same names are refused."""

    SUM = TorchReduceOp.SUM
    PRODUCT = TorchReduceOp.PRODUCT
    MIN = TorchReduceOp.MIN
    MAX = TorchReduceOp.MAX
    BAND = TorchReduceOp.BAND
    BOR = TorchReduceOp.BOR
    BXOR = TorchReduceOp.BXOR


def all_reduce(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Reduce the tensors of all ranks, in place, on all ranks."""
    _check_tensor(tensor, "tensor")
    if group is GroupMember.NON_GROUP_MEMBER:
        return None
    options = AllreduceOptions()
    options.reduceOp = _torch_op(op)
    return _finish(_chosen(group).allreduce([tensor], options), async_op)


def broadcast(tensor: torch.Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Copy the tensor of global rank ``src`` to all ranks."""
    _check_tensor(tensor, "tensor")
    if group is GroupMember.NON_GROUP_MEMBER:
        return None
    chosen, root = group_and_rank(group, src)
    options = BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    return _finish(chosen.broadcast([tensor], options), async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce the tensors of all ranks, on global rank ``dst``."""
    _check_tensor(tensor, "tensor")
    if group is GroupMember.NON_GROUP_MEMBER:
        return None
    chosen, root = group_and_rank(group, dst)
    options = ReduceOptions()
    options.reduceOp = _torch_op(op)
    options.rootRank = root
    return _finish(chosen.reduce([tensor], options), async_op)


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather the tensors of all ranks on all ranks."""
    _check_tensors(tensor_list, "tensor_list")
    _check_tensor(tensor, "tensor")
    if group is GroupMember.NON_GROUP_MEMBER:
        return None
    return _finish(_chosen(group).allgather([tensor_list], [tensor]), async_op)


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce the lists of all ranks element by element, and give each rank its element."""
    _check_tensor(output, "output")
    _check_tensors(input_list, "input_list")
    if group is GroupMember.NON_GROUP_MEMBER:
        return None
    options = ReduceScatterOptions()
    options.reduceOp = _torch_op(op)
    return _finish(_chosen(group).reduce_scatter([output], [input_list], options), async_op)


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather the tensors of all ranks on global rank ``dst``. Some releases of the vendor lack this function."""
    _check_tensor(tensor, "tensor")
    if group is GroupMember.NON_GROUP_MEMBER:
        return None
    chosen, root = group_and_rank(group, dst)
    outputs = _only_at(root, chosen, gather_list, "gather_list")
    options = GatherOptions()
    options.rootRank = root
    return _finish(chosen.gather(outputs, [tensor], options), async_op)


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Give each rank its element of global rank ``src``'s list. Some releases of the vendor lack this function."""
    _check_tensor(tensor, "tensor")
    if group is GroupMember.NON_GROUP_MEMBER:
        return None
    chosen, root = group_and_rank(group, src)
    inputs = _only_at(root, chosen, scatter_list, "scatter_list")
    options = ScatterOptions()
    options.rootRank = root
    return _finish(chosen.scatter([tensor], inputs, options), async_op)


def isend(tensor: torch.Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Any:
    """Start to send to global rank ``dst``; return the work handle."""
    _check_tensor(tensor, "tensor")
    if group is GroupMember.NON_GROUP_MEMBER:
        return None
    chosen, rank = group_and_rank(group, dst)
    return chosen.send([tensor], rank, tag)


def irecv(tensor: torch.Tensor, src: int, group: ProcessGroup | None = None, tag: int = 0) -> Any:
    """Start to receive from global rank ``src``; return the work handle."""
    _check_tensor(tensor, "tensor")
    if group is GroupMember.NON_GROUP_MEMBER:
        return None
    chosen, rank = group_and_rank(group, src)
    return chosen.recv([tensor], rank, tag)


def send(tensor: torch.Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Send to global rank ``dst``. As in the vendor's package, runs the whole graph first."""
    _run_all()
    work = isend(tensor, dst, group, tag)
    if work is not None:
        work.wait()


def recv(tensor: torch.Tensor, src: int, group: ProcessGroup | None = None, tag: int = 0) -> int:
    """Receive from global rank ``src``; return ``src``. As in the vendor's package, runs the whole graph first."""
    _run_all()
    work = irecv(tensor, src, group, tag)
    if work is None:
        return -1
    work.wait()
    return src


def barrier(group: ProcessGroup | None = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """Wait for all ranks; ``device_ids`` is ignored."""
    del device_ids
    if group is GroupMember.NON_GROUP_MEMBER:
        return None
    return _finish(_chosen(group).barrier(), async_op)


def _run_all() -> None:
    _C.run_live(_C.current_device())


def _chosen(group: ProcessGroup | None) -> ProcessGroup:
    return group if group is not None else default_group()


def _finish(work: Any, async_op: bool) -> Any:
    if async_op:
        return work
    work.wait()
    return None


def _torch_op(op: ReduceOp) -> TorchReduceOp:
    if not isinstance(op, ReduceOp):
        raise TypeError(
            f"torch_gcu.distributed: {op!r} is not one of its reductions; use torch_gcu.distributed.ReduceOp, "
            "not from torch.distributed"
        )
    return op.value


def _only_at(root: int, group: ProcessGroup, tensors: list[torch.Tensor] | None, name: str) -> list[Any]:
    """Check the tensors, and return them as gloo takes them: in a list on the root, else an empty list."""
    if get_rank(group) != root:
        if tensors:
            raise RuntimeError(f"torch_gcu.distributed: {name} must be given on the root rank only")
        return []
    _check_tensors(tensors, name)
    return [tensors]


def _check_tensor(value: Any, name: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"Invalid function argument. Expected parameter `{name}` to be of type torch.Tensor.")


def _check_tensors(value: Any, name: str) -> None:
    if not isinstance(value, list) or not all(isinstance(item, torch.Tensor) for item in value):
        raise RuntimeError(f"Invalid function argument. Expected parameter `{name}` to be of type List[torch.Tensor].")
