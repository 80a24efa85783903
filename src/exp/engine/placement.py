"""Whether every parameter and buffer is where its rank computes, and a report of where they are."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from exp.errors import PlacementError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["check_optimizer", "check_placement", "placement_report"]

_SHOWN = 5


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def check_placement(model: nn.Module, device: torch.device, rank: int) -> None:
    """Refuse a model that is not wholly on ``device``, before it is wrapped.

    Raises:
        PlacementError: names the rank, the first misplaced tensors, their devices and shapes.
    """
    wrong = [(name, tensor) for name, tensor in _tensors(model) if not _same(tensor.device, device)]
    if not wrong:
        return
    shown = "\n".join(f"  {name}: {tensor.device}, shape {tuple(tensor.shape)}" for name, tensor in wrong[:_SHOWN])
    more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    raise PlacementError(
        f"rank {rank}: {len(wrong)} of {len(_tensors(model))} parameters and buffers are not on {device}; "
        f"make every tensor of the model a parameter or a buffer, and do not move it after it was built:\n{shown}{more}"
    )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Refuse an optimizer that would train other tensors than the model's: one built before the model was moved.

    Raises:
        PlacementError: names the rank and how many of its tensors are strangers to the model.
    """
    own = {id(parameter) for parameter in model.parameters()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if strangers:
        raise PlacementError(
            f"rank {rank}: {len(strangers)} tensors of the optimizer are not parameters of the model; "
            "build the optimizer after the model has been moved to its device"
        )


def placement_report(
    model: nn.Module, device: torch.device, rank: int, local_rank: int, world_size: int, process_group: str
) -> str:
    """Where this rank's parameters are: counts by device, the first five, and the rank's place in the group."""
    parameters = list(model.named_parameters())
    by_device = Counter(str(tensor.device) for _, tensor in _tensors(model))
    lines = [
        f"placement: rank {rank}  local_rank {local_rank}  world_size {world_size}  device {device}  {process_group}",
        f"  {sum(p.numel() for _, p in parameters):,} values in {len(parameters)} parameters; tensors by device: "
        + ", ".join(f"{name} {count}" for name, count in sorted(by_device.items())),
    ]
    lines += [f"  {n}: {p.device}, shape {tuple(p.shape)}, {p.dtype}" for n, p in parameters[:_SHOWN]]
    return "\n".join(lines)


def _same(actual: torch.device, wanted: torch.device) -> bool:
    return actual.type == wanted.type and (wanted.index is None or actual.index == wanted.index)
