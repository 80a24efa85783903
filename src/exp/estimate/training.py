"""What a training asks for: the rate of its floating-point operations, and a batch that fits into memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from exp.data.base import Data
from exp.engine.optim import BackwardOnly
from exp.estimate.memory import META
from exp.estimate.tracer import Tracer, as_batch, largest_sample, model_on_meta
from exp.hardware.compat import backward_with_modes, supports_estimates
from exp.hardware.matmul import matrix_rate

if TYPE_CHECKING:
    from exp.hardware.backend import Backend
    from exp.session import Session


logger = logging.getLogger(__name__)

LEAST_SECONDS = 5.0
"""Trainings shorter than this get no FLOP rate: start-up dominates them, and counting takes some tenths of a second."""


def trace_flops(model: nn.Module, batch: dict[str, Any]) -> int:
    """Floating-point operations of one forward and backward pass.

    Only matrix products, convolutions and attention count; a multiply-add is two operations, as in torch
    (:mod:`torch.utils.flop_counter`).

    Args:
        model: model on the meta device.
        batch: batch on the meta device.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter, META:
        model.train().train_step(batch, BackwardOnly(backward=backward_with_modes))  # type: ignore[operator]
    model.zero_grad(set_to_none=True)
    return int(counter.get_total_flops())


def training_rate(session: Session, data: Data, samples_per_second: float, seconds: float) -> dict[str, float]:
    """FLOP rate of a training, as keys of ``result.json``.

    Operations are counted as in :func:`trace_flops`; activations that are recomputed in the backward pass count again.
    This rank alone measures the device's rate of plain matrix products.

    Args:
        session: session of the training, which is over.
        data: the data set.
        samples_per_second: rate over all ranks.
        seconds: duration of the training.

    Returns:
        ``flops_per_second`` over all ranks, and ``flops_share``: that rate divided by the device's rate of matrix
        products in the same precision times the number of ranks. Empty if the training was shorter than
        :data:`LEAST_SECONDS`, torch is too old, the model needs values, or the device has no memory left.
    """
    if seconds < LEAST_SECONDS or not supports_estimates():
        return {}
    config: Any = session.config
    try:
        batch = as_batch(largest_sample(data, "train", config.seed), config.batch_size)
        flops = trace_flops(model_on_meta(config.model, data.model_arguments()), batch) / float(config.batch_size)
        rate = matrix_rate(session.backend, session.device, config.precision) * session.info.world_size
    except Exception as error:  # noqa: BLE001
        # The model may read values, or the card may be full: a missing rate must not fail the run.
        logger.info("the rate is not measured: %s: %s", type(error).__name__, error)
        return {}
    return {"flops_per_second": flops * samples_per_second, "flops_share": flops * samples_per_second / rate}


def suggest_batch(config: Any, backend: Backend, memory: int | None, headroom: float) -> dict[str, int] | None:
    """The batch that fits, after the configured one has run out of memory.

    Args:
        config: frozen configuration.
        backend: backend of the configuration.
        memory: memory of the card in bytes; None: unknown.
        headroom: share of ``memory`` that is kept free for what is not counted.

    Returns:
        As :meth:`exp.estimate.tracer.Tracer.fitting_batch`; None: no batch fits, ``memory`` is unknown, or the
        estimate fails, which is logged.
    """
    if memory is None:
        return None
    try:
        return Tracer(config, backend).fitting_batch(int(memory * (1 - headroom)), more_than=config.accumulate)
    except Exception as error:  # noqa: BLE001 - the run has failed already; the estimate must not hide that error
        logger.info("no estimate of what fits: %s: %s", type(error).__name__, error)
        return None
