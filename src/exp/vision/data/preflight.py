"""Whether image data can be there: checked by the parent before any process starts.

Looks at folders, not at every file, and imports neither torch nor numpy nor OpenCV.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Sequence

from exp.errors import DataError
from exp.vision.data.layouts import SPLITS, data_root, layout_of
from exp.vision.data.mmrs1m import MODALITIES

__all__ = ["STATISTICS", "preflight", "read_statistics"]

STATISTICS = "statistics.json"
"""The file that ``task=stats`` and trainings leave in a run folder."""


def preflight(config: Any) -> None:
    """Refuse values that mean nothing, and a root without the expected folders.

    Args:
        config: the keys of ``data``; the numbers in a file of statistics take its place, and the number of bands that
            of channels.

    Raises:
        DataError: says what is wrong, what was expected and what is there.
    """
    layout = layout_of(config)
    _take_bands(config)
    _take_statistics(config)
    shares, classes = list(config.split), list(config.classes or [])
    if len(shares) != 3 or min(shares) < 0 or min(shares[:2]) == 0 or abs(sum(shares) - 1.0) > 1e-6:
        raise DataError(
            f"data.split={shares} must be three shares that add up to 1, of train, val and test; only the last may be 0"
        )
    if len(set(classes)) < len(classes):
        raise DataError(f"data.classes={classes} names a class twice; each class once")
    if config.on_error not in ("raise", "skip"):
        raise DataError(f"data.on_error={config.on_error} is not one of raise, skip")
    given = {config.modality, *(config.modality_weights or ()), *(config.modality_statistics or ())} - {None}
    if not given <= set(MODALITIES):
        raise DataError(f"data.modality and data.modality_* name {given}; there are {', '.join(MODALITIES)}")
    if "palette" in config:
        _check_masks(config, layout.knows_classes)
    layout.check(data_root(config.root, config.sample_data, config.name))


def _take_bands(config: Any) -> None:
    """Set ``channels`` to the number of bands, where these are named."""
    key = "band_names" if config.bands is None else "bands"
    if config[key] is None:
        return
    wanted = list(config[key])
    if not wanted or any(type(band) not in (int, str) or band == 0 for band in wanted):
        raise DataError(f"data.{key}={wanted} must list bands by number, from 1, or by name")
    if config.channels not in (3, len(wanted)):  # 3 is the default
        raise DataError(
            f"data.channels={config.channels}, but data.{key} names {len(wanted)}; give as many as the weights know, "
            "or leave data.channels out"
        )
    config.channels = len(wanted)


def _take_statistics(config: Any) -> None:
    """Put the numbers of a file in the place of its path, for ``data.mean`` and ``data.std``."""
    if isinstance(config.mean, str) and config.std is None:
        config.std = config.mean  # one file has both, and so has the training split
    for key in ("mean", "std"):
        if isinstance(config[key], str) and config[key] != "train":
            config[key] = read_statistics(f"data.{key}", Path(config[key]).expanduser(), (key,))[key]


def read_statistics(key: str, path: Path, wanted: Sequence[str] = ()) -> dict[str, Any]:
    """Mean and standard deviation of each band, and what else a file of statistics says.

    Args:
        key: what names the file, for messages.
        path: of the file, or of the run folder that it lies in.
        wanted: what it has to have.

    Raises:
        DataError: there is no such file, or it lacks that.
    """
    try:
        content = json.loads((path / STATISTICS if path.is_dir() else path).read_text(encoding="utf-8"))
        return {**content, **{name: list(content[name]) for name in wanted}}
    except (OSError, ValueError, TypeError, KeyError) as error:
        text = f"it has no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise DataError(
            f"{key}={path} is neither numbers nor train, nor a file of statistics ({text}); task=stats and trainings "
            f"with data.mean=train write {STATISTICS}"
        ) from error


def _check_masks(config: Any, layout_knows: bool) -> None:
    palette, classes, values = dict(config.palette or {}), list(config.classes or ()), dict(config.mask_values or {})
    names = list(palette) or classes
    if not names and not layout_knows:
        raise DataError(
            "neither data.palette nor data.classes is set; masks of colors need data.palette={class: RRGGBB, ...}, "
            "masks of class numbers data.classes=[class, ...]"
        )
    if palette and (values or (classes and names != classes)):
        raise DataError(
            f"data.palette has the classes {', '.join(names)}, for masks of colors, but data.classes={classes} and "
            f"data.mask_values={values} are for masks of class numbers; set data.palette=null, or leave them out"
        )
    written = [*palette.values(), *config.ignore_colors]
    colors = [str(color).upper() for color in written]
    for color, plain in zip(written, colors):
        if not re.fullmatch("[0-9A-F]{6}", plain) or colors.count(plain) > 1:
            # Without quotes 000000 is the number 0, and 6E1234 infinity; the shell takes one pair of quotes away.
            raise DataError(
                f"data.palette and data.ignore_colors: {color!r} must be a color of its own, RRGGBB in hexadecimal, "
                "quoted twice, or digits become a number: "
                "'data.palette={road: \"6E1234\"}' 'data.ignore_colors=[\"6E1234\"]'"
            )
    if (names and not set(values.values()) <= set(range(len(names)))) or set(values).intersection(config.ignore_values):
        raise DataError(
            f"data.mask_values={values} must give class numbers below {len(names)}, of values that are not in "
            f"data.ignore_values={list(config.ignore_values)} ([]: every value counts)"
        )
    if config.parts and not {"train", "val"} <= set(config.parts) <= set(SPLITS):
        raise DataError(f"data.parts names {', '.join(config.parts)}; it must have train and val, and may have test")
