"""Whether image data can be there: checked by the parent before any process starts.

Looks at folders, not at every file, and imports neither torch nor numpy nor OpenCV.
"""

from __future__ import annotations

import re
from typing import Any, Mapping, Sequence

from exp.errors import DataError
from exp.vision.data import folders, loveda, masks, mmrs1m, mmrs1m_masks, spectral
from exp.vision.data.listing import PARTS, data_root

__all__ = ["preflight"]

_LAYOUTS = {"SceneData": ("folders", "mmrs1m"), "SegmentationData": ("masks", "loveda", "mmrs1m")}


def preflight(config: Mapping[str, Any]) -> None:
    """Refuse values that mean nothing, and a root without the expected folders.

    Args:
        config: has the fields of :class:`exp.vision.config.SceneDataConfig` or ``SegmentationDataConfig``; the numbers
            in a file of statistics take its place, and the number of bands that of channels.

    Raises:
        DataError: says what is wrong, what was expected and what is there.
    """
    kind = config["_target_"].rpartition(".")[2]
    _check_values(config)
    layout = config["layout"]
    if layout not in _LAYOUTS.get(kind, (layout,)):
        raise DataError(f"data.layout={layout} is not one of {', '.join(_LAYOUTS[kind])}")
    _check_modalities(config)
    root = data_root(config["root"], config["sample_data"], config["name"])
    if layout == "folders":
        folders.check(root, unlabelled=kind == "DistillationData")
    elif layout == "mmrs1m":
        if config["modality"] not in (None, *mmrs1m.MODALITIES):
            raise DataError(f"data.modality={config['modality']} is not one of {', '.join(mmrs1m.MODALITIES)}, or null")
        if kind == "SegmentationData":
            _check_masks(config)
            mmrs1m_masks.check(root)
        else:
            mmrs1m.chosen(root, config["datasets"], config["modality"])
    elif layout == "loveda":
        _check_loveda(config)
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
    classes = list(config["classes"] or [])
    twice = [name for number, name in enumerate(classes) if name in classes[:number]]
    if twice:
        raise DataError(f"data.classes={classes} names {twice[0]} twice; each class once")
    if config["classes"] is not None and not classes:
        raise DataError("data.classes=[] names no class; list them, or leave it out")
    spectral.check(config)


def _check_modalities(config: Mapping[str, Any]) -> None:
    for key in ("modality_weights", "modality_statistics"):
        given = config[key] or {}
        if given and config["layout"] != "mmrs1m":
            raise DataError(f"data.{key} is for data.layout=mmrs1m, where the names of data sets tell their modality")
        unknown = [name for name in given if name not in mmrs1m.MODALITIES]
        if unknown:
            raise DataError(f"data.{key}: {unknown[0]} is not one of {', '.join(mmrs1m.MODALITIES)}")
    wrong = [name for name, share in (config["modality_weights"] or {}).items() if share < 0]
    if wrong:
        raise DataError(f"data.modality_weights: the share of {wrong[0]} must not be negative")
    for name, each in (config["modality_statistics"] or {}).items():
        lists = [each.get(key) if hasattr(each, "get") else None for key in ("mean", "std")]
        fitting = all(values is not None and len(values) in (1, config["channels"]) for values in lists)
        if not fitting or min(lists[1] or [0.0]) <= 0:
            raise DataError(
                f"data.modality_statistics.{name}={each} must be {{mean: [...], std: [...]}} with a number for each of "
                f"{config['channels']} bands, or one for all, and deviations above 0"
            )


def _check_loveda(config: Mapping[str, Any]) -> None:
    for key in ("classes", "palette"):
        if config[key] and list(config[key]) != loveda.CLASSES:
            raise DataError(
                f"data.{key} names {', '.join(config[key])}, but LoveDA has the classes {', '.join(loveda.CLASSES)}; "
                f"leave data.{key} out, or use data=segmentation"
            )


def _check_masks(config: Mapping[str, Any]) -> None:
    palette, classes = config["palette"], config["classes"]
    if not palette and not classes:
        raise DataError(
            "neither data.palette nor data.classes is set; masks of colours need data.palette={class: RRGGBB, ...}, "
            "masks of class numbers data.classes=[class, ...]"
        )
    if len(palette or classes) > 254:
        raise DataError(f"data has {len(palette or classes)} classes; at most 254 can be")
    if palette and classes and list(palette) != list(classes):
        raise DataError(
            f"data.palette has the classes {', '.join(palette)}, but data.classes={list(classes)}; leave out "
            "data.classes where masks hold colours, and set data.palette=null where they hold class numbers"
        )
    if not 0.0 <= config["max_unknown"] <= 1.0:
        raise DataError(f"data.max_unknown={config['max_unknown']} must be a share from 0 to 1")
    metres = config.get("metres_per_pixel")
    if metres is not None and metres <= 0:
        raise DataError(f"data.metres_per_pixel={metres} must be more than 0, or null")
    if palette:
        _check_colours(palette, config["ignore_colours"])
    _check_numbers(config, len(palette or classes))
    if config["parts"] and not {"train", "val"} <= set(config["parts"]) <= set(PARTS):
        raise DataError(f"data.parts names {', '.join(config['parts'])}; it must have train and val, and may have test")


def _check_colours(palette: Mapping[str, str], ignored: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    given = [("data.palette", name, color) for name, color in palette.items()]
    given += [("data.ignore_colours", "data.ignore_colours", color) for color in ignored]
    for key, name, color in given:
        if not re.fullmatch("[0-9A-Fa-f]{6}", str(color)):
            # Without quotes 000000 is the number 0, and 6E1234 infinity; the shell takes one pair of quotes away.
            example = '["6E1234"]' if name == key else f'{{{name}: "6E1234"}}'
            raise DataError(
                f"{key}: the colour {color!r}{'' if name == key else f' of {name}'} must be RRGGBB in hexadecimal, "
                f"quoted twice, or digits become a number: '{key}={example}'"
            )
        if seen.setdefault(color.upper(), name) != name:
            raise DataError(f"data: {name} and {seen[color.upper()]} have the same colour {color}")


def _check_numbers(config: Mapping[str, Any], count: int) -> None:
    values = config["mask_values"]
    if values and config["palette"]:
        raise DataError(
            "data.mask_values is for masks of class numbers, and data.palette for masks of colours; set one"
        )
    wrong = [f"{value}: {label}" for value, label in (values or {}).items() if label not in range(count)]
    if wrong:
        raise DataError(f"data.mask_values: {', '.join(wrong)} is no class number; there are {count} classes")
    for key, numbers in (("mask_values", list(values or {})), ("ignore_values", list(config["ignore_values"]))):
        beyond = [number for number in numbers if not -(2**31) <= number < 2**31]
        if beyond:
            raise DataError(f"data.{key} names {beyond[0]}, which no mask can hold: values have 32 bits at most")
    both = sorted(set(values or {}) & set(config["ignore_values"]))
    if both:
        raise DataError(
            f"{both[0]} is in data.mask_values and in data.ignore_values; leave it out of one of them "
            "(data.ignore_values=[]: every value counts)"
        )
