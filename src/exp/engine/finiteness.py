"""Whether weights are finite: asked on the device, and read once for all of them."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Container, Mapping, Sequence, TypeVar

import torch

from exp import console
from exp.data.loader import tensors_of
from exp.data.places import shortened
from exp.engine import checkpoint
from exp.engine.fsdp import local_part
from exp.engine.wrapper import unwrapped
from exp.errors import RunError
from exp.task import to_continue

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["check_finite", "nan_in", "not_finite", "refuse_nan", "what_to_do"]

logger = logging.getLogger(__name__)
_Key = TypeVar("_Key")


def not_finite(state: Mapping[_Key, Any], parameters: Container[_Key]) -> list[_Key]:
    """Names of the tensors in a state dict that hold what no sound training leaves there.

    For parameters that is NaN or infinity; a buffer may hold infinity, as masks of attention
    do, but not NaN. The device is waited for once, or twice where something is not finite.

    Args:
        state: tensors by name.
        parameters: names of those that are parameters.
    """
    candidates = {
        name: local_part(value.detach())
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and local_part(value).numel()
    }
    # A sum is finite only where all its elements are. It may overflow before they do, so what it suspects is looked at
    # element by element, which takes several times as long, and memory.
    sums = _read({name: value.sum() for name, value in candidates.items()})
    # A difference is NaN where the element is not finite.
    odd = {
        name: ((value - value).ne(0) if name in parameters else value.ne(value)).any()
        for name, value in candidates.items()
        if not math.isfinite(sums[name])
    }
    return [name for name, value in _read(odd).items() if value]


def _read(values: Mapping[_Key, torch.Tensor]) -> dict[_Key, float]:
    """Values of one element each, by name; the device is waited for once."""
    if not values:
        return {}
    device = next(iter(values.values())).device  # of all, but for a state that was copied before a validation
    return dict(zip(values, torch.stack([value.float().to(device) for value in values.values()]).cpu().tolist()))


def check_finite(runner: Any, state: Mapping[str, Any], step: int) -> None:
    """Raise, on all ranks alike, where weights that are to be saved, or losses on the way to them, are not finite.

    A collective. What would fail when the losses are read next is not saved before.

    Args:
        runner: the runner.
        state: what is to be saved.
        step: optimizer steps completed.

    Raises:
        RunError: it names the step, the rank and the first of the tensors.
    """
    model = unwrapped(runner.model)
    losses = {f"the {name} since the last reading": value for name, value in runner.losses.sums.items()}
    watched = {name for name, _ in model.named_parameters()} | set(losses)
    found = not_finite({**losses, **state}, watched)
    by_rank = runner.distributed_group.gather(found)
    ranks = [rank for rank, names in enumerate(by_rank) if names]
    if ranks:
        raise RunError(
            f"not finite after step {step}: {shortened(by_rank[ranks[0]], 1)}, on rank {shortened(ranks)}; the weights "
            f"are not saved; {what_to_do(runner)}"
        )


def refuse_nan(runner: Any, sums: Sequence[Sequence[torch.Tensor]], stage: str) -> None:
    """Raise, on all ranks alike, where predictions are NaN. A collective; the device is waited for once.

    A metric need not show them: the largest of several NaN is the first class, and means leave samples without a figure
    out.

    Args:
        runner: the runner.
        sums: of each batch of this rank, the sum of each tensor of floating point in its predictions. It is NaN where
            an element is; the infinity of a class that is masked leaves it infinite.
        stage: ``val`` or ``test``.

    Raises:
        RunError: they are; it names the first batch.
    """
    read = _read({(batch, place): value for batch, found in enumerate(sums) for place, value in enumerate(found)})
    wrong = sorted({batch for (batch, _), value in read.items() if math.isnan(value)})
    by_rank = runner.distributed_group.gather((wrong, len(sums)))
    first = next(((rank, found[0]) for rank, (found, _) in enumerate(by_rank) if found), None)
    if first is not None:
        total, batches = sum(len(found) for found, _ in by_rank), sum(count for _, count in by_rank)
        advice = "check the weights and the data, or use precision=fp32"
        raise RunError(
            f"predictions are NaN in {total} of {batches} {'validation' if stage == 'val' else stage} batches, first "
            f"in batch {first[1] + 1} of rank {first[0]}; {advice if runner.train_loop is None else what_to_do(runner)}"
        )


def nan_in(batch: Any) -> str:
    """What to add where a loss is not finite and this batch, the latest, is not, either; else nothing.

    Args:
        batch: of the loader; its tensors are read.
    """
    parts = batch.items() if isinstance(batch, Mapping) else ()
    tensors = {(key, place): value for key, part in parts for place, value in enumerate(tensors_of(part))}
    found = list(dict.fromkeys(key for key, _ in not_finite(tensors, ())))
    if not found:
        return ""
    names = ", ".join(map(repr, found))
    return f"; the latest batch has nan in {names}: leave those values out of the loss, or mend the data"


def what_to_do(runner: Any) -> str:
    """Advice for a training that has diverged, with the command that goes on where something has been saved.

    A collective: the checkpoint that is being written counts.
    """
    session: Session = runner.session
    try:
        runner.checkpoint_writer.wait()
    except Exception:
        logger.exception("the last checkpoint is not saved")  # not why training has failed
    runner.distributed_group.barrier()
    text = "lower optim.lr, set optim.clip_grad_norm, or use precision=fp32"
    saved = checkpoint.list_checkpoints(session.folder.checkpoints)
    which, wanted = "newest", "auto"
    if len(saved) > 1 and session.resumed_from is not None and saved[0].samefile(session.resumed_from):
        which, wanted = "last but one", console.shown(saved[1])  # from the newest it has just been tried
    rate = f"optim.lr={session.config.optim.lr / 2:.4g}"
    command = to_continue(session.config, session.folder, f"resume={wanted}", rate)
    return f"{text}\n  to go on from the {which} checkpoint with half the rate: {command}" if command else text
