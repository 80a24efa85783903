"""The figures of an estimate, and the batch that fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exp.estimate.trace import Tracer, trace_flops
from exp.estimate.tracker import KINDS
from exp.models.base import parameter_counts

if TYPE_CHECKING:
    from exp.backend import Backend

__all__ = ["estimate", "fitting_batch"]

_LARGEST = 2**16
"""Samples; a larger batch is not looked for."""


def estimate(config: Any, backend: Backend, memory: int | None, headroom: float) -> dict[str, Any]:
    """What a training takes.

    Args:
        config: validated, with batch sizes.
        backend: of it; nothing of its hardware is asked for.
        memory: bytes of a card; None: not known, and no batch is looked for.
        headroom: the share of it that is left to what is not counted.

    Returns:
        The content of ``estimate.json`` (docs/estimate.md has its keys).

    Raises:
        ConfigError: as :class:`exp.estimate.trace.Tracer`.
        DataError: likewise.
    """
    tracer = Tracer(config, backend)
    subject, sharing = tracer.subject, tracer.sharing
    model, training, validation = subject.model, tracer.peak, tracer.validate()
    ranks = config.nproc * config.launcher.nnodes
    flops = trace_flops(model, subject.train_batch(config.batch_size), subject.context())
    weights = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    passes = {"training": training, "validation": validation}
    peak = max(each.total for each in passes.values() if each is not None)
    budget = None if memory is None else int(memory * (1 - headroom))
    return {
        "experiment": config.name,
        "backend": config.backend.name,
        "wrapper": config.wrapper.kind if ranks > 1 else "none",
        "precision": config.precision,
        "world_size": ranks,
        "batch_size": config.batch_size,
        "accumulate": config.accumulate,
        "global_batch_size": config.global_batch_size,
        "eval_batch_size": subject.eval_batch_size,
        **parameter_counts(model),
        "flops_per_sample": flops / config.batch_size,
        "flops_per_step": flops / config.batch_size * config.global_batch_size,
        "memory": {
            name: None if each is None else {"total": each.total, **{kind: each.by_kind[kind] for kind in KINDS}}
            for name, each in passes.items()
        },
        "memory_peak": peak,
        "checkpoint_bytes": weights + tracer.optimizer_bytes,
        "weights_bytes": weights,
        "reduced_bytes_per_step": sharing.reduced,
        "gathered_bytes_per_step": sharing.gathered,
        "sent_bytes_per_rank_and_step": sharing.sent(ranks),
        "card_memory": memory,
        "headroom": headroom,
        "fits": None if budget is None else peak <= budget,
        "largest_batch_size": None if budget is None else largest_batch(tracer, budget),
        "advice": None if budget is None else fitting_batch(tracer, budget),
        "torch": torch.__version__,
        "notes": tracer.notes,
    }


def largest_batch(tracer: Tracer, budget: int) -> int:
    """The largest batch per device whose training step takes at most ``budget`` bytes; 0: not even one sample.

    Memory is all but linear in the batch: it is extrapolated, then tried out.
    """
    size = tracer.config.batch_size
    low, high = 0, _LARGEST + 1  # fits, does not fit
    points = {size: tracer.peak.total}
    guess = 2 * size
    while high - low > max(1, low // 50):  # within 2 %
        guess = min(max(guess, low + 1), high - 1)
        points[guess] = tracer.train(guess).total
        low, high = (guess, high) if points[guess] <= budget else (low, guess)
        (a, at_a), (b, at_b) = sorted(points.items())[-2:]
        slope = max(at_b - at_a, 1) / (b - a)
        near = points.get(low, at_a) if low else at_a
        guess = int((low or a) + (budget - near) / slope)
    return low


def fitting_batch(tracer: Tracer, budget: int, more_than: int = 0) -> dict[str, int] | None:
    """The largest batch per device that fits and keeps the global batch, by more micro-batches where need be.

    Args:
        tracer: of the configuration.
        budget: bytes.
        more_than: so many micro-batches, or fewer, are known not to fit.

    Returns:
        ``{"batch_size", "accumulate", "memory"}``; None: not even one sample at a time fits.
    """
    config = tracer.config
    share = config.global_batch_size // (config.nproc * config.launcher.nnodes)
    for accumulate in range(more_than + 1, share + 1):
        if share % accumulate:
            continue
        total = tracer.train(share // accumulate, accumulate).total
        if total <= budget:
            return {"batch_size": share // accumulate, "accumulate": accumulate, "memory": total}
    return None
