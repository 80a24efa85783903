"""Whether weights are finite: asked on the device, and read once for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Container, Mapping

import torch

from exp import console
from exp.advice import to_continue
from exp.engine import checkpoint
from exp.engine.wrapper import unwrapped
from exp.errors import RunError

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["check_finite", "not_finite", "what_to_do"]


def not_finite(state: Mapping[str, Any], parameters: Container[str]) -> list[str]:
    """Names of the tensors in a state dict that hold what no sound training leaves there.

    For parameters that is NaN or infinity; a buffer may hold infinity, as masks of attention
    do, but not NaN. The device is waited for once.

    Args:
        state: tensors by name.
        parameters: names of those that are parameters.
    """
    found: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            value = value.detach()
            # A norm would overflow before its elements do; a difference is NaN where the element is not finite.
            odd = (value - value).ne(0) if name in parameters else value.ne(value)
            found.setdefault(value.device, []).append((name, odd.any().float().reshape(())))
    names = []
    for entries in found.values():
        values = torch.stack([verdict for _, verdict in entries]).cpu().tolist()
        names += [name for (name, _), value in zip(entries, values) if value]
    return names


def check_finite(runner: Any, state: Mapping[str, Any] | None, step: int) -> None:
    """Raise, on all ranks alike, where weights that are to be saved, or losses on the way to them, are not finite.

    A collective. What would fail when the losses are read next is not saved before.

    Args:
        runner: the runner.
        state: what is to be saved; None: the model's own.
        step: optimizer steps completed.

    Raises:
        RunError: it names the step, the rank and the first of the tensors.
    """
    model = unwrapped(runner.model)
    losses = {f"the {name} since the last reading": value for name, value in runner.losses.sums().items()}
    watched = {name for name, _ in model.named_parameters()} | set(losses)
    found = not_finite({**losses, **(model.state_dict() if state is None else state)}, watched)
    by_rank = runner.distributed_group.gather(found)
    ranks = [rank for rank, names in enumerate(by_rank) if names]
    if ranks:
        names = by_rank[ranks[0]]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        where = ", ".join(map(str, ranks))
        raise RunError(
            f"not finite after step {step}: {names[0]}{more}, on rank {where}; the weights are not saved; "
            f"{what_to_do(runner.session)}"
        )


def what_to_do(session: Session) -> str:
    """Advice for a training that has diverged, with the command that goes on where something has been saved."""
    text = "lower optim.lr, set optim.clip_grad_norm, or use precision=fp32"
    saved = checkpoint.list_checkpoints(session.folder.checkpoints)
    which, wanted = "newest", "auto"
    if len(saved) > 1 and session.resumed_from is not None and saved[0].samefile(session.resumed_from):
        which, wanted = "last but one", console.shown(saved[1])  # from the newest it has just been tried
    rate = f"optim.lr={session.config.optim.lr / 2:.4g}"
    command = to_continue(session.config, session.folder, f"resume={wanted}", rate)
    return f"{text}\n  to go on from the {which} checkpoint with half the rate: {command}" if command else text
