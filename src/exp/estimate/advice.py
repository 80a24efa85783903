"""Which batch fits, for a training that has run out of memory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from exp.compat import supports_estimates

if TYPE_CHECKING:
    from exp.backend import Backend

__all__ = ["HEADROOM", "what_fits"]

logger = logging.getLogger(__name__)

HEADROOM = 0.1
"""The share of a card that is left to what is not counted, where nobody has said another."""


def what_fits(config: Any, backend: Backend, memory: int | None) -> dict[str, int] | None:
    """The batch per device that fits and keeps the global batch, smaller than the one that did not.

    Args:
        config: frozen.
        backend: of it.
        memory: bytes of the card; None: not known.

    Returns:
        ``{"batch_size", "accumulate", "memory"}``; None: none fits, or it cannot be told here, whose reason is logged.
    """
    if memory is None or not supports_estimates():
        return None
    try:
        from exp.estimate.figures import fitting_batch
        from exp.estimate.trace import Tracer

        tracer = Tracer(config, backend)
        return fitting_batch(tracer, int(memory * (1 - HEADROOM)), more_than=config.accumulate)
    except Exception:  # the run has failed already, of something else; this is an extra
        logger.exception("no estimate of what fits")
        return None
