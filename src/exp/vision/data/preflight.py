"""Whether image data can be there: checked by the parent before any process starts.

Looks at folders, not at every file, and imports neither torch nor numpy nor OpenCV.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Iterator

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
    checks = [*_values(config), *(_masks(config, layout.knows_classes) if "palette" in config else ())]
    for is_wrong, text in checks:
        if is_wrong:
            raise DataError(text)
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


def _values(config: Any) -> Iterator[tuple[bool, str]]:
    """Whether keys that all image data have are wrong, and what to say then."""
    channels, shares, limits, stretch = config.channels, list(config.split), config.value_range, config.stretch
    classes = list(config.classes or [])
    yield config.on_error not in ("raise", "skip"), f"data.on_error={config.on_error} is not one of raise, skip"
    is_split = len(shares) == 3 and min(shares) >= 0 and min(shares[:2]) > 0 and abs(sum(shares) - 1.0) < 1e-6
    yield (
        not is_split,
        f"data.split={shares} must be three shares that add up to 1, of train, val and test; only the last may be 0",
    )
    yield len(set(classes)) < len(classes), f"data.classes={classes} names a class twice; each class once"
    yield (
        limits is not None and not _is_range(limits, channels),
        f"data.value_range={limits} must be [low, high], low below high, numbers or a list with one for each of "
        f"{channels} bands; data.stretch measures them",
    )
    yield (
        stretch is not None and not (len(stretch) == 2 and 0 <= stretch[0] < stretch[1] <= 100),
        f"data.stretch={stretch} must be two percentiles from 0 to 100, the lower one first",
    )
    yield (
        stretch is not None and limits is not None,
        "data.stretch and data.value_range both say what becomes 0 and 255; set one of them to null",
    )
    for key in ("modality_weights", "modality_statistics"):
        unknown = sorted({*(config[key] or {})} - {*MODALITIES})
        yield bool(unknown), f"data.{key}: {', '.join(unknown)} is not one of {', '.join(MODALITIES)}"


def _is_range(limits: Any, channels: int) -> bool:
    if isinstance(limits, (str, int, float)) or len(limits) != 2:
        return False
    low, high = ([each] * channels if isinstance(each, (int, float)) else list(each) for each in limits)
    are_numbers = len(low) == len(high) == channels and all(map(_is_number, low + high))
    return are_numbers and all(least < largest for least, largest in zip(low, high))


def _take_statistics(config: Any) -> None:
    """Put the numbers of a file in the place of its path, for ``data.mean`` and ``data.std``."""
    if isinstance(config.mean, str) and config.std is None:
        config.std = config.mean  # one file has both, and so has the training split
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
        if len(values) not in (1, config.channels) or not all(map(_is_number, values)):
            raise DataError(
                f"data.{key}={given}: there are {config.channels} bands; give a number for each, the path of a "
                f"{STATISTICS}, or train"
            )
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
        given = [content[name] for name in ("mean", "std") if name in content]
        if all(values and all(map(_is_number, values)) for values in given) and (given or "value_range" in content):
            return content
        raise ValueError('expected {"mean": [...], "std": [...]}')
    except (OSError, ValueError, TypeError) as error:
        text = str(error).splitlines()[0]
        raise DataError(
            f"{key}={path} is neither numbers nor train, nor a file of statistics ({text}); task=stats writes "
            f"{STATISTICS}"
        ) from error


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _masks(config: Any, layout_knows: bool) -> Iterator[tuple[bool, str]]:
    """Like :func:`_values`, for masks."""
    palette, classes, values = dict(config.palette or {}), list(config.classes or ()), dict(config.mask_values or {})
    names = list(palette) or classes
    yield (
        not names and not layout_knows,
        "neither data.palette nor data.classes is set; masks of colors need data.palette={class: RRGGBB, ...}, masks "
        "of class numbers data.classes=[class, ...]",
    )
    yield (
        bool(palette and classes) and names != classes,
        f"data.palette has the classes {', '.join(names)}, but data.classes={classes}; leave out data.classes where "
        "masks hold colors, and set data.palette=null where they hold class numbers",
    )
    seen: dict[str, str] = {}
    for name, color in [*palette.items(), *(("", each) for each in config.ignore_colors)]:
        key = f"'data.palette={{{name}: \"6E1234\"}}'" if name else "'data.ignore_colors=[\"6E1234\"]'"
        # Without quotes 000000 is the number 0, and 6E1234 infinity; the shell takes one pair of quotes away.
        yield (
            not re.fullmatch("[0-9A-Fa-f]{6}", str(color)),
            f"the color {color!r} must be RRGGBB in hexadecimal, quoted twice, or digits become a number: {key}",
        )
        other = seen.setdefault(str(color).upper(), name)
        yield other != name, f"data: {name or 'ignore_colors'} and {other} have the same color {color}"
    yield (
        bool(values and palette),
        "data.mask_values is for masks of class numbers, and data.palette for masks of colors; set one",
    )
    wrong = [f"{value}: {label}" for value, label in values.items() if names and label not in range(len(names))]
    yield bool(wrong), f"data.mask_values: {', '.join(wrong)} is no class number; there are {len(names)} classes"
    both = sorted({*values} & {*config.ignore_values})
    yield (
        bool(both),
        f"{', '.join(map(str, both))} is in data.mask_values and in data.ignore_values; leave it out of one of them "
        "(data.ignore_values=[]: every value counts)",
    )
    parts = {*(config.parts or {})}
    yield (
        bool(parts) and not {"train", "val"} <= parts <= {*SPLITS},
        f"data.parts names {', '.join(sorted(parts))}; it must have train and val, and may have test",
    )
