"""An image with the class that a model gives it, as a tile of a contact sheet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from exp.vision.draw.pictures import shrunk, to_rgb
from exp.vision.draw.sheet import Tile

__all__ = ["Scene", "scene_tile"]

_RIGHT, _WRONG = (46, 160, 67), (214, 39, 40)


class Scene(NamedTuple):
    """The prediction for one image.

    Attributes:
        file: its path.
        best: the likeliest classes, as (class, probability), the likeliest first.
        truth: its class, where that is known.
    """

    file: str
    best: list[tuple[str, float]]
    truth: str | None = None


def scene_tile(image: np.ndarray, scene: Scene) -> Tile:
    """An image with its predicted class; framed green or red where the truth is known, which then is named."""
    name, share = scene.best[0]
    captions = [f"{name}  {100 * share:.0f} %"]
    frame = None
    if scene.truth is None:
        captions.append(scene.file.rsplit("/", 1)[-1])
    else:
        frame = _RIGHT if scene.truth == name else _WRONG
        captions.append("right" if scene.truth == name else f"is {scene.truth}")
    return Tile(to_rgb(shrunk(image, 512)), captions, frame)
