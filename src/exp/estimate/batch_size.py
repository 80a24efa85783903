"""Batch sizes that fit into the memory of a card."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from exp.estimate.tracer import Tracer

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = ["fitting_batch", "largest_batch", "suggest_batch"]

logger = logging.getLogger(__name__)


def largest_batch(tracer: Tracer, budget: int) -> int:
    """The largest batch per device whose training step needs at most ``budget`` bytes; 0: not even one sample fits.

    Memory is almost linear in the batch size: it is extrapolated from the configured batch and one twice as large, and
    the result is corrected after one trial.
    """
    size, at_size = tracer.config.batch_size, tracer.peak["total"]
    per_sample = max(tracer.train(2 * size)["total"] - at_size, size) / size
    largest = max(int(size + (budget - at_size) / per_sample), 0)
    excess = tracer.train(largest)["total"] - budget if largest else 0
    return max(largest - math.ceil(excess / per_sample), 0) if excess > 0 else largest


def fitting_batch(tracer: Tracer, budget: int, more_than: int = 0) -> dict[str, int] | None:
    """The largest batch per device that fits with the same global batch, by accumulating more micro-batches.

    Args:
        tracer: tracer of the configuration.
        budget: available bytes.
        more_than: try only more micro-batches than this.

    Returns:
        ``batch_size``, ``accumulate`` and ``memory`` (bytes); None: not even one sample per micro-batch fits.
    """
    config = tracer.config
    samples_per_rank = config.global_batch_size // (config.nproc * config.launcher.nnodes)
    for accumulate in range(more_than + 1, samples_per_rank + 1):
        if samples_per_rank % accumulate == 0:
            total = tracer.train(samples_per_rank // accumulate, accumulate)["total"]
            if total <= budget:
                return {"batch_size": samples_per_rank // accumulate, "accumulate": accumulate, "memory": total}
    return None


def suggest_batch(config: Any, backend: Backend, memory: int | None, headroom: float) -> dict[str, int] | None:
    """The batch that fits, after the configured one has run out of memory.

    Args:
        config: frozen configuration.
        backend: backend of the configuration.
        memory: memory of the card in bytes; None: unknown.
        headroom: share of ``memory`` that is kept free for what is not counted.

    Returns:
        As :func:`fitting_batch`; None: no batch fits, ``memory`` is unknown, or the estimate fails, which is logged.
    """
    if memory is None:
        return None
    try:
        return fitting_batch(Tracer(config, backend), int(memory * (1 - headroom)), more_than=config.accumulate)
    except Exception as error:  # noqa: BLE001 - the run has failed already; the estimate must not hide that error
        logger.info("no estimate of what fits: %s: %s", type(error).__name__, error)
        return None
