"""Whether image data can be there: checked by the parent before any process starts.

Looks at folders, not at every file, and imports neither torch nor numpy nor OpenCV.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Mapping

from exp.errors import DataError
from exp.vision.data.layouts import SPLITS, Layout, data_root, layout_of
from exp.vision.data.mmrs1m import MMRS1M, MODALITIES

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
    _check_values(config)
    channels = _check_bands(config)
    _check_range(config, channels)
    _check_mean(config, channels)
    layout = layout_of(config)
    _check_modalities(config, channels, isinstance(layout, MMRS1M))
    if "palette" in config:
        _check_masks(config, layout)
    layout.check(data_root(config.root, config.sample_data, config.name))


def _check_values(config: Any) -> None:
    for key in ("size", "channels"):
        if config[key] < 1:
            raise DataError(f"data.{key}={config[key]} must be at least 1")
    if config.on_error not in ("raise", "skip"):
        raise DataError(f"data.on_error={config.on_error} is not one of raise, skip")
    shares = list(config.split)
    if len(shares) != 3 or min(shares) < 0 or min(shares[:2]) == 0 or abs(sum(shares) - 1.0) > 1e-6:
        raise DataError(
            f"data.split={shares} must be three shares that add up to 1, of train, val and test; only the last may be 0"
        )
    classes = list(config.classes or [])
    if len(set(classes)) < len(classes):
        raise DataError(f"data.classes={classes} names a class twice; each class once")


def _check_bands(config: Any) -> int:
    """How many bands the model gets."""
    bands, names = config.bands, config.band_names
    if bands is None and names is None:
        return int(config.channels)
    wanted = list(names if bands is None else bands)
    key = "band_names" if bands is None else "bands"
    wrong = [
        each for each in wanted if isinstance(each, (bool, float)) or not isinstance(each, (int, str)) or each == 0
    ]
    if not wanted or wrong:
        raise DataError(f"data.{key}={wanted} must list bands by number, from 1, or by name")
    if names is not None and len({str(name).casefold() for name in names}) < len(names):
        raise DataError(f"data.band_names={list(names)} names a band twice; each has a name of its own")
    if config.channels not in (3, len(wanted)):  # 3 is the default
        raise DataError(
            f"data.channels={config.channels}, but data.{key} names {len(wanted)}; give as many as the weights know, "
            "or leave data.channels out"
        )
    config.channels = len(wanted)
    return len(wanted)


def _check_range(config: Any, channels: int) -> None:
    limits, stretch = config.value_range, config.stretch
    if limits not in (None, "auto") and not _is_range(limits, channels):
        raise DataError(f"data.value_range={limits} must be [low, high], low below high, or auto, or null")
    if config.stretch_scope not in ("train", "image"):
        raise DataError(f"data.stretch_scope={config.stretch_scope} is not one of train, image")
    if stretch is None:
        if config.stretch_scope != "train":
            raise DataError("data.stretch_scope=image does nothing without data.stretch, such as [2,98]")
        return
    if len(stretch) != 2 or not 0 <= stretch[0] < stretch[1] <= 100:
        raise DataError(f"data.stretch={list(stretch)} must be two percentiles from 0 to 100, the lower one first")
    if limits is not None:
        raise DataError("data.stretch and data.value_range both say what becomes 0 and 255; set one of them to null")


def _is_range(limits: Any, channels: int) -> bool:
    if isinstance(limits, (str, int, float)) or len(limits) != 2:
        return False
    low, high = ([each] * channels if isinstance(each, (int, float)) else list(each) for each in limits)
    numbers = all(isinstance(each, (int, float)) for each in (*low, *high))
    return numbers and len(low) == len(high) == channels and all(a < b for a, b in zip(low, high))


def _check_mean(config: Any, channels: int) -> None:
    if isinstance(config.mean, str) and config.mean != "train" and config.std is None:
        config.std = config.mean  # one file has both
    if config.mean == "train" and config.std is None:
        config.std = "train"
    for key in ("mean", "std"):
        given = config[key]
        if given is None or given == "train":
            continue
        if isinstance(given, str):
            path = Path(given).expanduser()
            content = read_statistics(f"data.{key}", path)
            if key not in content:
                raise DataError(f"data.{key}: {path} has none; take one that task=stats or data.mean=train has written")
            given = content[key]
        values = [given] if isinstance(given, (int, float)) else list(given)
        if not values or not all(map(_is_number, values)):
            raise DataError(f"data.{key}={given} must be numbers, the path of a {STATISTICS}, or train")
        if len(values) not in (1, channels):
            raise DataError(f"data.{key} has {len(values)} numbers, but there are {channels} bands; give one for each")
        if key == "std" and min(values) <= 0:
            raise DataError(f"data.std={values} must be more than 0: values are divided by it")
        config[key] = values
    if (config.mean is None) != (config.std is None) or (config.mean == "train") != (config.std == "train"):
        raise DataError(
            f"data.mean={config.mean}, but data.std={config.std}; give numbers for both, or data.mean=train alone"
        )


def read_statistics(key: str, path: Path) -> dict[str, Any]:
    """Mean and standard deviation of each band, and what else a file of statistics says.

    Args:
        key: what names the file, for messages.
        path: of the file, or of the run folder that it lies in.

    Raises:
        DataError: there is no such file, or it holds no such lists.
    """
    file = path / STATISTICS if path.is_dir() else path
    try:
        content = dict(json.loads(file.read_text(encoding="utf-8")))
        numbers = all(content[name] and all(map(_is_number, content[name])) for name in ("mean", "std"))
    except KeyError:
        numbers = path.is_dir() and "value_range" in content  # a training without data.mean
    except (OSError, ValueError, TypeError) as error:
        text = str(error).splitlines()[0]
        raise DataError(
            f"{key}={path} is neither numbers nor train, nor a file of statistics ({text}); task=stats writes "
            f"{STATISTICS}"
        ) from error
    if not numbers:
        raise DataError(f'{key}: {file} holds no numbers by band; expected {{"mean": [...], "std": [...]}}')
    return content


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_modalities(config: Any, channels: int, known: bool) -> None:
    for key in ("modality_weights", "modality_statistics"):
        given: Mapping[str, Any] = config[key] or {}
        if given and not known:
            raise DataError(f"data.{key} is for MMRS-1M, where the names of data sets tell their modality")
        unknown = [name for name in given if name not in MODALITIES]
        if unknown:
            raise DataError(f"data.{key}: {unknown[0]} is not one of {', '.join(MODALITIES)}")
    if min((config.modality_weights or {"": 0.0}).values()) < 0:
        raise DataError(f"data.modality_weights={config.modality_weights} must not be negative")
    for name, each in (config.modality_statistics or {}).items():
        lists = [each.get(key) if hasattr(each, "get") else None for key in ("mean", "std")]
        if not all(values and len(values) in (1, channels) for values in lists) or min(lists[1] or [0.0]) <= 0:
            raise DataError(
                f"data.modality_statistics.{name}={each} must be {{mean: [...], std: [...]}} with a number for each of "
                f"{channels} bands, or one for all, and deviations above 0"
            )


def _check_masks(config: Any, layout: Layout) -> None:
    palette, classes, values = config.palette, config.classes, config.mask_values
    names = list(palette or classes or ())
    if not names and not layout.knows_classes:
        raise DataError(
            "neither data.palette nor data.classes is set; masks of colors need data.palette={class: RRGGBB, ...}, "
            "masks of class numbers data.classes=[class, ...]"
        )
    if len(names) > 254:
        raise DataError(f"data has {len(names)} classes; at most 254 can be")
    if palette and classes and names != list(classes):
        raise DataError(
            f"data.palette has the classes {', '.join(names)}, but data.classes={list(classes)}; leave out "
            "data.classes where masks hold colors, and set data.palette=null where they hold class numbers"
        )
    if config.gsd is not None and config.gsd <= 0:
        raise DataError(f"data.gsd={config.gsd} must be more than 0, or null")
    _check_colors(config)
    if values and palette:
        raise DataError("data.mask_values is for masks of class numbers, and data.palette for masks of colors; set one")
    wrong = [f"{value}: {label}" for value, label in (values or {}).items() if label not in range(len(names))]
    if names and wrong:
        raise DataError(f"data.mask_values: {', '.join(wrong)} is no class number; there are {len(names)} classes")
    both = sorted(set(values or {}) & set(config.ignore_values))
    if both:
        raise DataError(
            f"{both[0]} is in data.mask_values and in data.ignore_values; leave it out of one of them "
            "(data.ignore_values=[]: every value counts)"
        )
    if config.parts and not {"train", "val"} <= set(config.parts) <= set(SPLITS):
        raise DataError(f"data.parts names {', '.join(config.parts)}; it must have train and val, and may have test")


def _check_colors(config: Any) -> None:
    seen: dict[str, str] = {}
    given = [("data.palette", name, color) for name, color in (config.palette or {}).items()]
    given += [("data.ignore_colors", "data.ignore_colors", color) for color in config.ignore_colors]
    for key, name, color in given:
        if not re.fullmatch("[0-9A-Fa-f]{6}", str(color)):
            # Without quotes 000000 is the number 0, and 6E1234 infinity; the shell takes one pair of quotes away.
            example = '["6E1234"]' if name == key else f'{{{name}: "6E1234"}}'
            raise DataError(
                f"{key}: the color {color!r}{'' if name == key else f' of {name}'} must be RRGGBB in hexadecimal, "
                f"quoted twice, or digits become a number: '{key}={example}'"
            )
        if seen.setdefault(color.upper(), name) != name:
            raise DataError(f"data: {name} and {seen[color.upper()]} have the same color {color}")
