"""Published weights of backbones: their names, and their size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Iterable, Mapping, NamedTuple, Pattern, Sequence, TypeVar

import torch

from exp.errors import ConfigError, nearest
from exp.models.base import best_prefix
from exp.runs.files import read_json
from exp.vision.backbones.base import State

__all__ = [
    "Names",
    "check_config",
    "check_size",
    "count_blocks",
    "find_prefix",
    "find_size",
    "pixel_statistics",
    "rename_published",
]

_Size = TypeVar("_Size")


class Names(NamedTuple):
    """How tensors are named in published files.

    Attributes:
        landmark: pattern of a name that only such a network has; its first group is the prefix of all names, such as
            ``backbone.`` or ``teacher.backbone.``.
        replaced: patterns of parts of names without the prefix, and what replaces them here, in this order.
    """

    landmark: Pattern[str]
    replaced: Sequence[tuple[Pattern[str], str]]

    @classmethod
    def of(cls, landmark: str, replaced: Iterable[tuple[str, str]]) -> Names:
        """Compile the patterns."""
        return cls(re.compile(landmark), [(re.compile(pattern), name) for pattern, name in replaced])


def rename_published(
    state: State, names: Names, modules: Iterable[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None:
    """Rename the tensors of a published file; where it has several models, of the one that ``best_prefix`` chooses.

    Args:
        state: tensors by name.
        names: of the publications.
        modules: names of the backbone's modules.

    Returns:
        The backbone's tensors by the names here, and the others by their names in the file; None if no name is a
        landmark.
    """
    prefix = find_prefix(names.landmark, state)
    if prefix is None:
        return None
    inside, weights, others = set(modules), {}, {}
    for key, value in state.items():
        name = key[len(prefix) :]
        for pattern, replacement in names.replaced if key.startswith(prefix) else ():
            name = pattern.sub(replacement, name)
        if key.startswith(prefix) and name.split(".")[0] in inside:
            weights[name] = value
        else:
            others[key] = value
    return weights, others


def find_prefix(landmark: Pattern[str], state: State) -> str | None:
    """The prefix of a published network's names, such as ``backbone.``, which may be empty; None: there is none.

    Args:
        landmark: as in :class:`Names`. For several networks see :func:`exp.models.base.best_prefix`.
        state: tensors by name.
    """
    prefixes = [match.group(1) for match in map(landmark.match, state) if match]
    return best_prefix(prefixes) if prefixes else None


def find_size(name: str, sizes: Mapping[str, _Size]) -> _Size:
    """The size that ``model.backbone.size`` names.

    Raises:
        ConfigError: there is no such size.
    """
    if name not in sizes:
        raise ConfigError(f"model.backbone.size={name} is not one of {', '.join(sizes)}{nearest(name, sizes)}")
    return sizes[name]


def check_size(found: Any, size: str, sizes: Mapping[str, Any], source: Path) -> None:
    """Refuse weights of another size.

    Args:
        found: size of the weights.
        size: name of the backbone's size.
        sizes: by name.
        source: the file of the weights.

    Raises:
        ConfigError: the sizes differ.
    """
    if found == sizes[size]:
        return
    name = next((name for name, other in sizes.items() if other == found), None)
    way = f"set model.backbone.size={name}" if name else f"it is of no size that there is ({', '.join(sizes)})"
    raise ConfigError(f"init_from: {source} holds weights of another backbone than model.backbone.size={size}; {way}")


def count_blocks(state: State) -> tuple[int, ...]:
    """Number of blocks of each level, of weights with names ``blocks.<level>.<number>. ...``."""
    blocks = {tuple(map(int, name.split(".")[1:3])) for name in state if name.startswith("blocks.")}
    levels = [level for level, _ in blocks]
    return tuple(levels.count(level) for level in sorted(set(levels)))


def check_config(source: Path, expected: Mapping[str, Any], backbone: str) -> dict[str, Any]:
    """Compare ``config.json`` beside weights with what the backbone computes, which names and shapes do not show.

    Args:
        source: the file of the weights.
        expected: values of the backbone; a key that ``config.json`` lacks is not compared.
        backbone: what the backbone is, for the message.

    Returns:
        The content; empty without a file.

    Raises:
        ConfigError: the file has other values, or cannot be read.
    """
    file = source.parent / "config.json"
    try:
        config: dict[str, Any] = dict(read_json(file)) if file.is_file() else {}
    except (TypeError, ValueError, ConfigError, OSError) as error:
        raise ConfigError(
            f"init_from: {file.name} beside {source} cannot be read ({error}); put the weights where they have "
            "their own"
        ) from error
    differing = [
        f"{key}={config[key]}, not {value}" for key, value in expected.items() if config.get(key, value) != value
    ]
    if differing:
        raise ConfigError(
            f"init_from: {source} holds another network, as {file.name} beside it says ({'; '.join(differing)}); the "
            f"backbone is {backbone}"
        )
    return config


def pixel_statistics(source: Path) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation of each channel, 0..255, by the JSON files beside weights, as transformers and timm
    write them; None: they do not say.

    Raises:
        ConfigError: a file cannot be read.
    """
    files = [source.parent / name for name in ("config.json", "preprocessor_config.json")]
    try:
        config, processor = (read_json(file) if file.is_file() else {} for file in files)
        of_timm = {f"image_{key}": value for key, value in config.get("pretrained_cfg", {}).items()}
        return _statistics(processor) or _statistics(of_timm)
    except (AttributeError, TypeError, ValueError, ConfigError, OSError) as error:
        raise ConfigError(
            f"init_from: {' or '.join(file.name for file in files)} beside {source} cannot be read ({error}); put the "
            "weights where they have their own"
        ) from error


def _statistics(processor: Mapping[str, Any]) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation, 0..255, of a processor that rescales pixels before it normalizes them."""
    factor = float(processor.get("rescale_factor", 1 / 255)) if processor.get("do_rescale", True) else 1.0
    if not processor.get("do_normalize", True):
        return [0.0] * 3, [1.0 / factor] * 3
    if "image_mean" not in processor or "image_std" not in processor:
        return None
    mean, std = ([float(value) / factor for value in processor[key]] for key in ("image_mean", "image_std"))
    return mean, std
