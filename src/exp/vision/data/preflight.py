"""Check keys and folders of image data, in the parent before any process starts.

Does not look at every file, and imports neither torch nor numpy nor OpenCV.
"""

from __future__ import annotations

import re
from typing import Any

from exp.errors import DataError
from exp.vision.data.layouts import SPLITS, build_layout, data_root, source_configs

__all__ = ["preflight"]


def preflight(config: Any) -> None:
    """Refuse keys out of range, and a root without the expected folders.

    Args:
        config: the keys of ``data``.

    Raises:
        DataError: something is wrong; the message has what was expected and what was found.
    """
    for name, _, own in source_configs(config):
        _check(name, own)


def _check(name: str, config: Any) -> None:
    layout, shares = build_layout(config), list(config.split_ratio)
    if len(shares) != 3 or min(shares) < 0 or min(shares[:2]) == 0 or abs(sum(shares) - 1.0) > 1e-6:
        raise DataError(
            f"data.split_ratio={shares} must be three shares that add up to 1, of train, val and test; only the last "
            "may be 0"
        )
    if hasattr(config, "palette"):
        _check_masks(config, layout.defines_classes)
    splits = getattr(config, "splits", None)
    if splits and not {"train", "val"} <= set(splits) <= set(SPLITS):
        raise DataError(f"data.splits names {', '.join(splits)}; it must have train and val, and may have test")
    limits = list(getattr(config, "target_range", (0.0, 1.0)))
    if len(limits) != 2 or not limits[0] < limits[1]:
        raise DataError(f"data.target_range={limits} must be [low, high], in the unit of the targets")
    layout.check(data_root(config.root, config.sample_data, name))


def _check_masks(config: Any, layout_knows: bool) -> None:
    palette = dict(config.palette or {})
    if not palette and not config.classes and not layout_knows:
        raise DataError(
            "neither data.palette nor data.classes is set; masks of colors need data.palette={class: RRGGBB, ...}, "
            "masks of class numbers data.classes=[class, ...]"
        )
    written = [*palette.values(), *config.ignore_colors]
    colors = [str(color).upper() for color in written]
    for color, plain in zip(written, colors):
        if not re.fullmatch("[0-9A-F]{6}", plain) or colors.count(plain) > 1:
            # Without quotes 000000 is the number 0, and 6E1234 infinity; the shell removes one pair of quotes.
            raise DataError(
                f"data.palette and data.ignore_colors: {color!r} must be a color of its own, RRGGBB in hexadecimal, "
                "quoted twice, or digits become a number: "
                "'data.palette={road: \"6E1234\"}' 'data.ignore_colors=[\"6E1234\"]'"
            )
