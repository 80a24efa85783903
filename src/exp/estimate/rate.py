"""How fast a training computed, and which share of the device's rate in plain matrix products that is."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from exp.estimate.trace import as_batch, largest_sample, model_on_meta, trace_flops
from exp.hardware.compat import supports_estimates
from exp.hardware.numerics import matrix_rate

if TYPE_CHECKING:
    from exp.data.base import Data
    from exp.session import Session

__all__ = ["LEAST_SECONDS", "training_rate"]

logger = logging.getLogger(__name__)

LEAST_SECONDS = 5.0
"""Of training; a shorter one is mostly its own beginning, and not worth the tenths of a second that counting takes."""


def training_rate(session: Session, data: Data, samples_per_second: float, seconds: float) -> dict[str, float]:
    """Keys of ``result.json`` about the speed of a training.

    Operations are counted once, in a forward and backward pass of the bare model on the meta device, as torch counts
    them (:mod:`torch.utils.flop_counter`): matrix products, convolutions and attention, a multiplication and an
    addition being two. What is computed anew in backward counts. The device's rate is measured by this rank alone.

    Args:
        session: of the training, over.
        data: its data set.
        samples_per_second: over all ranks.
        seconds: that it took.

    Returns:
        ``flops_per_second`` over all ranks, and ``flops_share`` of the device's rate in the precision of the training
        times the ranks. Empty: too short, a torch that does not count, a model that does not run without
        values, or a device without memory for the products.
    """
    if seconds < LEAST_SECONDS or not supports_estimates():
        return {}
    config = session.config
    try:
        flops = _flops_per_sample(config, data) * samples_per_second
        rate = matrix_rate(session.backend, session.device, config.precision)
    except Exception as error:  # noqa: BLE001
        # A user's model that reads values, or a card that is full; a figure is not worth a run.
        logger.info("the rate is not measured: %s: %s", type(error).__name__, error)
        return {}
    return {"flops_per_second": flops, "flops_share": flops / (rate * session.info.world_size)}


def _flops_per_sample(config: Any, data: Data) -> float:
    model = model_on_meta(config.model, data.model_arguments())
    batch = as_batch(largest_sample(data, "train", config.seed), config.batch_size)
    return trace_flops(model, batch) / float(config.batch_size)
