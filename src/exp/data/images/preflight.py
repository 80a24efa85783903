"""Whether image data can be there: checked by the parent before any process starts.

Looks at folders, not at every file, and imports neither torch nor numpy nor OpenCV.
"""

from __future__ import annotations

import re
from typing import Any, Mapping

from exp.data.images import folders, loveda, masks, mmrs1m
from exp.data.images.listing import PARTS, data_root
from exp.errors import DataError

__all__ = ["preflight"]

_LAYOUTS = {"SceneData": ("folders", "mmrs1m"), "SegmentationData": ("masks", "loveda")}


def preflight(config: Mapping[str, Any]) -> None:
    """Refuse values that mean nothing, and a root without the expected folders.

    Args:
        config: has the fields of :class:`exp.config.schema.SceneDataConfig` or ``SegmentationDataConfig``.

    Raises:
        DataError: says what is wrong, what was expected and what is there.
    """
    kind = config["_target_"].rpartition(".")[2]
    _check_values(config)
    layout = config["layout"]
    if layout not in _LAYOUTS.get(kind, (layout,)):
        raise DataError(f"data.layout={layout} is not one of {', '.join(_LAYOUTS[kind])}")
    root = data_root(config["root"], config["sample_data"], config["name"])
    if layout == "folders":
        folders.check(root)
    elif layout == "mmrs1m":
        if config["modality"] not in (None, *mmrs1m.MODALITIES):
            raise DataError(f"data.modality={config['modality']} is not one of {', '.join(mmrs1m.MODALITIES)}, or null")
        mmrs1m.chosen(root, config["datasets"], config["modality"])
    elif layout == "loveda":
        loveda.check(root)
    else:
        _check_masks(config)
        masks.check(root, config["images"], config["masks"])


def _check_values(config: Mapping[str, Any]) -> None:
    for key, least in (
        ("size", 1),
        ("channels", 1),
        ("eval_batch_size", 1),
        ("num_workers", 0),
        ("cache_megabytes", 0),
    ):
        if config[key] < least:
            raise DataError(f"data.{key}={config[key]} must be at least {least}")
    if config["on_error"] not in ("raise", "skip"):
        raise DataError(f"data.on_error={config['on_error']} is not one of raise, skip")
    shares = list(config["split"])
    if len(shares) != 3 or min(shares) < 0 or min(shares[:2]) == 0 or abs(sum(shares) - 1.0) > 1e-6:
        raise DataError(
            f"data.split={shares} must be three shares that add up to 1, of train, val and test; only the last may be 0"
        )
    limits = config["value_range"]
    if limits is not None and (len(limits) != 2 or not limits[0] < limits[1]):
        raise DataError(f"data.value_range={list(limits)} must be [low, high], low below high, or null")


def _check_masks(config: Mapping[str, Any]) -> None:
    palette, classes = config["palette"], config["classes"]
    if not palette and not classes:
        raise DataError(
            "neither data.palette nor data.classes is set; masks of colours need data.palette={class: RRGGBB, ...}, "
            "masks of class numbers data.classes=[class, ...]"
        )
    if len(palette or classes) > 254:
        raise DataError(f"data has {len(palette or classes)} classes; at most 254 can be")
    seen: dict[str, str] = {}
    ignored = [(color, "data.ignore_colours") for color in config["ignore_colours"]]
    for color, name in [*((color, name) for name, color in (palette or {}).items()), *ignored]:
        if not re.fullmatch("[0-9A-Fa-f]{6}", str(color)):
            raise DataError(f'data: the colour {color!r} of {name} must be RRGGBB in hexadecimal, quoted: "3C1098"')
        if seen.setdefault(color.upper(), name) != name:
            raise DataError(f"data: {name} and {seen[color.upper()]} have the same colour {color}")
    numbers = range(len(palette or classes))
    wrong = [f"{value}: {label}" for value, label in (config["mask_values"] or {}).items() if label not in numbers]
    if wrong:
        raise DataError(f"data.mask_values: {', '.join(wrong)} is no class number; there are {len(numbers)} classes")
    if config["parts"] and not {"train", "val"} <= set(config["parts"]) <= set(PARTS):
        raise DataError(f"data.parts names {', '.join(config['parts'])}; it must have train and val, and may have test")
