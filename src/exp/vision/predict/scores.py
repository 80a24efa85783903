"""The model as prediction calls it: raw pixels in, scores out, without gradients and in the run's precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import torch

from exp.engine.wrapper import forward, preprocessed
from exp.vision.dinov3.inference import augmented

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
    """(B, C, H, W), 0..255, on the CPU -> scores (B, K, H, W), float32, on the model's device.

    Scores are logits; with the model's test-time augmentation (``model.tta_scales``, ``model.tta_flip``), sums of
    probabilities over scaled and mirrored copies, as in evaluation.
    """
    scales = [float(scale) for scale in session.config.model.get("tta_scales", [1.0])]
    flip = bool(session.config.model.get("tta_flip", False))

    def logits(image: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = forward(model, preprocessed(model, {"image": image}), "tensor").float()
        return result

    def scores(image: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), session.backend.autocast(session.config.precision):
            found = augmented(logits, image.to(session.device), scales, flip)
        session.backend.end_batch()
        return found

    return scores
