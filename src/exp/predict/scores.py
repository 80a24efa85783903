"""The model as prediction calls it: raw pixels in, scores out, without gradients and in the run's precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import torch
import torch.nn.functional as F

from exp.engine.loops import move

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["batch_outputs", "pixel_scores", "scene_scores"]


def batch_outputs(session: Session, model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """What the model predicts for a batch of the data, as its metrics take it, on the CPU."""
    with torch.no_grad(), session.backend.autocast(session.config.precision):
        outputs: torch.Tensor = model(**move(batch, session.device), mode="predict")
    return outputs.cpu()


def scene_scores(session: Session, model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """(B, C, H, W), 0..255, on the CPU -> probabilities (B, K), float32, on the CPU."""

    def scores(image: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), session.backend.autocast(session.config.precision):
            logits = model(image=image.to(session.device), mode="tensor")
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
    mirrors = (False, True) if session.config.model.get("tta_flip", False) else (False,)
    augmented = scales != [1.0] or len(mirrors) > 1

    def scores(image: torch.Tensor) -> torch.Tensor:
        image = image.to(session.device)
        with torch.no_grad(), session.backend.autocast(session.config.precision):
            if not augmented:
                found = model(image=image, mode="tensor").float()
            else:
                found = sum(_of_copy(model, image.float(), scale, mirrored) for scale in scales for mirrored in mirrors)
        session.backend.end_batch()
        return found

    return scores


def _of_copy(model: Any, image: torch.Tensor, scale: float, mirrored: bool) -> torch.Tensor:
    """Probabilities (B, K, H, W) of a scaled, perhaps mirrored copy, brought back to the image's own pixels."""
    size = (image.shape[-2], image.shape[-1])
    if scale != 1.0:
        target = [max(round(extent * scale), 1) for extent in size]
        image = F.interpolate(image, size=target, mode="bilinear", align_corners=False)
    logits = model(image=image.flip(-1) if mirrored else image, mode="tensor").float()
    logits = logits.flip(-1) if mirrored else logits
    if logits.shape[-2:] != size:
        logits = F.interpolate(logits, size=size, mode="bilinear", align_corners=False)
    return torch.softmax(logits, dim=1)
