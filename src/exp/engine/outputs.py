"""A model's predictions for a batch, outside of an evaluation loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exp.engine.loops import move
from exp.engine.wrapper import predictions

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["batch_outputs"]


def batch_outputs(session: Session, model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """What the model predicts for a batch of the data, as its metrics take it, on the CPU."""
    with torch.no_grad(), session.backend.autocast(session.config.precision):
        outputs: torch.Tensor = predictions(model, move(batch, session.device))
    return outputs.detach().cpu()
