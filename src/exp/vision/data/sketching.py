"""What batches of images look like, as far as the configuration alone tells."""

from __future__ import annotations

from typing import Any, Mapping

import torch

from exp.data.base import Sketch

__all__ = ["sketch_of"]

_ASSUMED_CLASSES = 50


def sketch_of(keys: Mapping[str, Any], ignore_index: int) -> Sketch:
    """Images of ``data.size``; the classes of ``data.palette`` or ``data.classes``.

    Args:
        keys: of ``data``.
        ignore_index: the label that does not count.
    """
    wanted = keys.get("bands") or keys.get("band_names")
    size, channels = int(keys["size"]), len(wanted) if wanted else int(keys["channels"])
    classes = len(keys.get("palette") or keys.get("classes") or ())
    notes = [f"validation images are taken to be {size} x {size}"]
    if not classes:
        classes = _ASSUMED_CLASSES
        notes.append(f"how many classes the data have is not known; taken are {classes}")
    image = torch.zeros(1, channels, size, size, dtype=torch.uint8)
    sample = {"image": image, **{name: torch.zeros(1, dtype=torch.int64) for name in ("label", "index")}}
    arguments = {"num_classes": classes, "in_channels": channels, "ignore_index": ignore_index}
    return Sketch(sample, sample, arguments, int(keys["eval_batch_size"]), notes)
