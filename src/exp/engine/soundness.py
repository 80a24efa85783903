"""Whether weights are finite: asked on the device, and read once for all of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Container, Mapping

import torch

from exp.advice import to_continue
from exp.engine.wrapper import unwrapped
from exp.errors import RunError

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["check_finite", "not_finite", "what_to_do"]


def not_finite(state: Mapping[str, Any], parameters: Container[str]) -> list[str]:
    """Names of the tensors in a state dict that hold what no sound training leaves there.

    For parameters that is NaN or infinity (or a norm beyond float32); a buffer may hold infinity, as masks of attention
    do, but not NaN. The device is waited for once.

    Args:
        state: tensors by name, all on one device.
        parameters: names of those that are parameters.
    """
    names, verdicts = [], []
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            value = value.detach()
            verdict = value.norm(dtype=torch.float32) if name in parameters else value.ne(value).any().float()
            names.append((name, name in parameters))
            verdicts.append(verdict.reshape(()))
    if not verdicts:
        return []
    values = torch.stack(verdicts).cpu().tolist()
    return [name for (name, norm), value in zip(names, values) if (not math.isfinite(value) if norm else value)]


def check_finite(runner: Any, state: Mapping[str, Any] | None, step: int) -> None:
    """Raise, on all ranks alike, where weights that are to be saved are not finite. A collective.

    Args:
        runner: the runner.
        state: what is to be saved; None: the model's own.
        step: optimizer steps completed.

    Raises:
        RunError: it names the step, the rank and the first of the tensors.
    """
    model = unwrapped(runner.model)
    parameters = {name for name, _ in model.named_parameters()}
    found = runner.distributed_group.gather(not_finite(model.state_dict() if state is None else state, parameters))
    ranks = [rank for rank, names in enumerate(found) if names]
    if ranks:
        names = found[ranks[0]]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise RunError(
            f"the weights are not finite after step {step} ({names[0]}{more}) on rank {', '.join(map(str, ranks))}, "
            f"and are not saved; {what_to_do(runner.session)}"
        )


def what_to_do(session: Session) -> str:
    """Advice for a training that has diverged, with the command that goes on where something has been saved."""
    config = session.config
    text = "lower optim.lr, set optim.clip_grad_norm, or use precision=fp32"
    command = to_continue(config, session.folder, f"optim.lr={config.optim.lr / 2:.4g}")
    return f"{text}\n  to go on from the newest checkpoint with half the rate: {command}" if command else text
