"""Whether every parameter and buffer is where its rank computes, and a report of where they are."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from exp.errors import PlacementError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from exp.session import Session

__all__ = ["check_placement", "placement_report"]

_SHOWN = 5


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def check_placement(model: nn.Module, device: torch.device, rank: int) -> None:
    """Refuse a model that is not wholly on ``device``, before it is wrapped.

    Raises:
        PlacementError: names the rank, the first misplaced tensors, their devices and shapes.
    """
    wrong = [
        f"  {name}: {tensor.device}, shape {tuple(tensor.shape)}"
        for name, tensor in _tensors(model)
        if tensor.device.type != device.type or device.index not in (None, tensor.device.index)
    ]
    if wrong:
        more = [f"  and {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN)
        raise PlacementError(
            f"rank {rank}: {len(wrong)} of {len(_tensors(model))} parameters and buffers are not on {device}; make "
            "every tensor of the model a parameter or a buffer, and do not move it after it was built:\n"
            + "\n".join([*wrong[:_SHOWN], *more])
        )


def placement_report(model: nn.Module, session: Session) -> str:
    """Where this rank's parameters are: counts by device, the first five, and the rank's place in the group."""
    parameters, info = list(model.named_parameters()), session.info
    by_device = Counter(str(tensor.device) for _, tensor in _tensors(model))
    lines = [
        f"placement: rank {info.rank}  local_rank {info.local_rank}  world_size {info.world_size}  "
        f"device {session.device}  {session.process_group}",
        f"  {sum(p.numel() for _, p in parameters):,} values in {len(parameters)} parameters; tensors by device: "
        + ", ".join(f"{name} {count}" for name, count in sorted(by_device.items())),
    ]
    lines += [f"  {n}: {p.device}, shape {tuple(p.shape)}, {p.dtype}" for n, p in parameters[:_SHOWN]]
    return "\n".join(lines)
