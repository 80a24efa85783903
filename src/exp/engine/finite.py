"""Refuses weights and losses that are not finite, and advises what to do when a training diverges."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Container, Mapping

import torch

from exp import console
from exp.data.fingerprint import shortened
from exp.engine.checkpoint.files import list_checkpoints
from exp.engine.fsdp import local_part
from exp.engine.wrapper import unwrapped
from exp.errors import RunError
from exp.task import resume_command

if TYPE_CHECKING:
    pass


logger = logging.getLogger(__name__)


def nonfinite_tensors(state: Mapping[str, Any], parameters: Container[str]) -> list[str]:
    """Names of the tensors in a state dict with values that only a diverged training leaves.

    For parameters these are NaN and infinity. A buffer may contain infinity, as attention masks do, but not NaN. Waits
    for the device once, or twice if a sum is not finite.

    Args:
        state: tensors by name.
        parameters: names of the tensors that are parameters.
    """
    candidates = {
        name: local_part(value.detach())
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and local_part(value).numel()
    }
    # If a sum is finite, so are all its elements. A sum of finite elements may overflow, so a tensor whose sum is not
    # finite is checked element by element, which takes several times as long, and more memory.
    sums = _read_values({name: value.sum() for name, value in candidates.items()})
    # x - x is NaN where x is not finite.
    nonfinite = {
        name: ((value - value).ne(0) if name in parameters else value.ne(value)).any()
        for name, value in candidates.items()
        if not math.isfinite(sums[name])
    }
    return [name for name, value in _read_values(nonfinite).items() if value]


def _read_values(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Read 0-dim tensors by name; waits for the device once."""
    if not values:
        return {}
    device = next(iter(values.values())).device  # usually that of all tensors; others are moved there
    return dict(zip(values, torch.stack([value.float().to(device) for value in values.values()]).cpu().tolist()))


def check_finite(runner: Any, state: Mapping[str, Any], step: int) -> None:
    """Refuse to save weights that are not finite, or that follow losses that are not finite. A collective.

    The losses since the last reading are checked, too, because the run would fail at the next reading.

    Args:
        runner: the runner.
        state: the state dict to be saved.
        step: optimizer steps completed.

    Raises:
        RunError: a tensor is not finite; the message has step, rank and the first such tensor. Raised on every rank.
    """
    losses = {f"the {name} since the last reading": value for name, value in runner.losses.sums.items()}
    watched = {name for name, _ in unwrapped(runner.model).named_parameters()} | set(losses)
    by_rank = runner.distributed_group.gather(nonfinite_tensors({**losses, **state}, watched))
    ranks = [rank for rank, names in enumerate(by_rank) if names]
    if ranks:
        raise RunError(
            f"not finite after step {step}: {shortened(by_rank[ranks[0]], 1)}, on rank {shortened(ranks)}; the weights "
            f"are not saved; {divergence_advice(runner)}"
        )


def divergence_advice(runner: Any) -> str:
    """Advice for a diverged training and, if there is a checkpoint, the command that resumes with a lower rate.

    A collective, because it waits for the checkpoint that is being written.
    """
    session = runner.session
    try:
        runner.checkpoint_writer.wait()
    except Exception:
        logger.exception("the last checkpoint is not saved")  # only logged: not the reason for the failure
    runner.distributed_group.barrier()
    text = "lower optim.lr, set optim.clip_grad_norm, or use precision=fp32"
    checkpoints = list_checkpoints(session.folder.checkpoints)
    if not checkpoints:
        return text
    which, resume_from = "newest", "auto"
    if len(checkpoints) > 1 and session.resumed_from is not None and checkpoints[0].samefile(session.resumed_from):
        which, resume_from = (
            "last but one",
            console.display_path(checkpoints[1]),
        )  # this run has resumed from the newest, and diverged
    rate = f"optim.lr={session.config.optim.lr / 2:.4g}"
    command = resume_command(session.config, session.folder, f"resume={resume_from}", rate)
    return f"{text}\n  to resume from the {which} checkpoint with half the learning rate: {command}"
