"""The model as prediction calls it: raw pixels in, scores out, without gradients and in the run's precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import torch

from exp.engine.wrapper import forward, preprocessed

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["pixel_scores", "scene_scores"]


def scene_scores(session: Session, model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """(B, C, H, W), 0..255, on the CPU -> probabilities (B, K), float32, on the CPU."""

    def scores(image: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), session.backend.autocast(session.config.precision):
            logits = forward(model, preprocessed(model, {"image": image.to(session.device)}), "tensor")
        probabilities = torch.softmax(logits.float(), dim=-1).cpu()
        session.backend.end_batch()
        return probabilities

    return scores


def pixel_scores(session: Session, model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """(B, C, H, W), 0..255, on any device -> logits (B, K, H, W), float32, on the model's device."""

    def scores(image: torch.Tensor) -> torch.Tensor:
        batch = preprocessed(model, {"image": image.to(session.device)})
        with torch.no_grad(), session.backend.autocast(session.config.precision):
            logits: torch.Tensor = forward(model, batch, "tensor").float()
        session.backend.end_batch()
        return logits

    return scores
