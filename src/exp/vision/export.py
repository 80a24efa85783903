"""What ``task=export`` writes only of models of images: the backbone for transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Callable, Sequence

import torch
from safetensors.torch import load_file

from exp.engine.export import relative_difference
from exp.runs.files import write_json

__all__ = ["processor_config", "write_huggingface"]


def write_huggingface(model: Any, folder: Path, image: torch.Tensor, say: Callable[[str], None]) -> float:
    """Write the backbone for transformers, read it like any other weights, and compare features.

    Args:
        model: an :class:`exp.vision.models.ImageModel`.
        folder: exists.
        image: (B, C, H, W), 0..255.
        say: tells the user.

    Returns:
        The largest difference of the features (:func:`exp.engine.export.relative_difference`).

    Raises:
        ConfigError: the backbone cannot be written.
    """
    backbone, path, side = model.backbone, folder / "model.safetensors", image.shape[-1]
    mean, std = (values.flatten().tolist() for values in (model.pixel_mean, model.pixel_std))
    computed = backbone.write_huggingface(folder, side, model.band_names)
    write_json(folder / "preprocessor_config.json", processor_config(mean, std, side))
    published = backbone.adapt_state_dict(load_file(str(path)), path)
    loaded, state = copy.deepcopy(backbone), backbone.state_dict()
    loaded.load_state_dict(published.weights)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in published.statistics)
    pixels, expected = (image.float() - mean) / std, _flat_features(backbone, model.normalize(image))
    differing = [name for name in computed if not torch.equal(state[name], published.weights[name])]
    if differing:
        say(
            f"export: Hugging Face's form has no {', '.join(differing)}; those of the weights are rounded otherwise "
            "than transformers computes them, which moves features by "
            f"{relative_difference(_flat_features(loaded, pixels), expected):.2g} of the largest"
        )
        # What else differs is an error.
        loaded.load_state_dict({**published.weights, **{name: state[name] for name in differing}})
    return relative_difference(_flat_features(loaded, pixels), expected)


def _flat_features(backbone: Any, pixels: torch.Tensor) -> torch.Tensor:
    features = backbone(pixels)
    return torch.cat([values.flatten(1) for values in (*features.maps, *(features.cls or ()))], dim=1)


def processor_config(mean: Sequence[float], std: Sequence[float], image_size: int) -> dict[str, Any]:
    """Content of ``preprocessor_config.json``.

    Args:
        mean: of each channel, 0..255.
        std: standard deviation of each channel, 0..255.
        image_size: height and width, in pixels, to which images are scaled.
    """
    return {
        "image_processor_type": "DINOv3ViTImageProcessor", "do_resize": True,
        "size": {"height": image_size, "width": image_size}, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [value / 255 for value in mean],
        "image_std": [value / 255 for value in std],
    }  # fmt: skip
