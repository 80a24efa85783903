"""The model as prediction calls it: raw pixels in, scores out, without gradients and in the run's precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import torch

from exp.engine.wrapper import forward, preprocessed
from exp.vision.dinov3.inference import augmented

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["pixel_probabilities", "pixel_scores", "scene_scores"]


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
    scales, flip = _augmentation(session)

    def logits(image: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = forward(model, preprocessed(model, {"image": image}), "tensor").float()
        return result

    def scores(image: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), session.backend.autocast(session.config.precision):
            found = augmented(logits, image.to(session.device), scales, flip)
        session.backend.end_batch()
        return found

    return scores


def pixel_probabilities(session: Session) -> Callable[[torch.Tensor], torch.Tensor]:
    """Scores (K, h, w) of :func:`pixel_scores`, also means of several -> probabilities (K, h, w), float32."""
    scales, flip = _augmentation(session)

    def probabilities(scores: torch.Tensor) -> torch.Tensor:
        if scales == [1.0] and not flip:  # as exp.vision.dinov3.inference.augmented has it: logits
            return torch.softmax(scores, dim=0)
        return scores / scores.sum(dim=0, keepdim=True)

    return probabilities


def _augmentation(session: Session) -> tuple[list[float], bool]:
    model = session.config.model
    return [float(scale) for scale in model.get("tta_scales", [1.0])], bool(model.get("tta_flip", False))
