"""Synchronised batch norm only where the backend has it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mmengine.model import revert_sync_batchnorm
from torch import nn

if TYPE_CHECKING:
    from exp.backend import Backend

__all__ = ["fit_batchnorm"]

logger = logging.getLogger(__name__)


def fit_batchnorm(model: nn.Module, backend: Backend, synchronise: bool) -> tuple[nn.Module, str | None]:
    """Convert batch norms into what the backend can do.

    Args:
        model: with its weights; they are kept, and so are the running statistics.
        backend: says whether it synchronises.
        synchronise: make every batch norm a synchronised one (``wrapper.sync_batchnorm``).

    Returns:
        The model, and a warning where it got less than it wanted, else None.
    """
    has = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if backend.supports_sync_batchnorm:
        return (nn.SyncBatchNorm.convert_sync_batchnorm(model) if synchronise else model), None
    if not has and not synchronise:
        return model, None
    warning = (
        f"backend={backend.name} has no synchronised batch norm: statistics are those of each device's own "
        "samples; a larger batch_size makes up for it, or a norm that does not look at the batch"
    )
    logger.warning(warning)
    return (revert_sync_batchnorm(model) if has else model), warning
