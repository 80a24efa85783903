"""The keys that say which bands there are and what their values mean: checked by the parent. Imports no numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, MutableMapping

from exp.errors import DataError
from exp.vision.data.kept import read_statistics

__all__ = ["check"]


def check(config: Any) -> None:
    """Refuse values that mean nothing; put numbers in the place of a file of statistics.

    Args:
        config: of the data; changed in place.

    Raises:
        DataError: names the key.
    """
    channels = _check_bands(config)
    _check_ranges(config, channels)
    _check_mean(config, channels)


def _check_bands(config: MutableMapping[str, Any]) -> int:
    """How many bands the model gets."""
    bands, names = config["bands"], config["band_names"]
    if bands is None and names is None:
        return int(config["channels"])
    for key, given in (("bands", bands), ("band_names", names)):
        if given is not None and not len(given):
            raise DataError(f"data.{key}=[] names no band; list them, or leave it out")
    wrong = [band for band in bands or () if isinstance(band, (bool, float)) or not isinstance(band, (int, str))]
    if wrong:
        raise DataError(f"data.bands={list(bands)}: {wrong[0]} is neither a number nor a name of a band")
    beyond = [band for band in bands or () if isinstance(band, int) and band < 1]
    if beyond:
        raise DataError(f"data.bands={list(bands)}: there is no band {beyond[0]}; they count from 1")
    if names is not None and len({str(name).casefold() for name in names}) < len(names):
        raise DataError(f"data.band_names={list(names)} names a band twice; each has a name of its own")
    count = len(names if bands is None else bands)
    if config["channels"] not in (3, count):  # 3: nobody has said anything
        raise DataError(
            f"data.channels={config['channels']}, but data.bands names {count}; give as many as the weights "
            "know, or leave data.channels out"
        )
    config["channels"] = count
    return count


def _check_ranges(config: MutableMapping[str, Any], channels: int) -> None:
    limits, stretch = config["value_range"], config["stretch"]
    if limits is not None and limits != "auto" and not _is_range(limits, channels):
        shown = limits if isinstance(limits, (str, int, float)) else list(limits)
        raise DataError(f"data.value_range={shown} must be [low, high], low below high, or auto, or null")
    if config["stretch_scope"] not in ("train", "image"):
        raise DataError(f"data.stretch_scope={config['stretch_scope']} is not one of train, image")
    if stretch is None:
        if config["stretch_scope"] != "train":
            raise DataError("data.stretch_scope=image does nothing without data.stretch, such as [2,98]")
        return
    if len(stretch) != 2 or not 0 <= stretch[0] < stretch[1] <= 100:
        raise DataError(f"data.stretch={list(stretch)} must be two percentiles from 0 to 100, the lower one first")
    if limits is not None:
        raise DataError("data.stretch and data.value_range both say what becomes 0 and 255; set one of them to null")


def _is_range(limits: Any, channels: int) -> bool:
    if isinstance(limits, (str, int, float)) or len(limits) != 2:
        return False
    pairs = []
    for limit in limits:
        each = [limit] * channels if isinstance(limit, (int, float)) else limit
        if isinstance(each, str) or len(each) != channels or not all(isinstance(one, (int, float)) for one in each):
            return False
        pairs.append(each)
    return all(low < high for low, high in zip(*pairs))


def _check_mean(config: MutableMapping[str, Any], channels: int) -> None:
    for key in ("mean", "std"):
        given = config[key]
        if given is None or given == "train":
            continue
        if isinstance(given, str):
            config[key] = _from_file(f"data.{key}", given)[key]
            if key == "mean" and config["std"] is None:
                config["std"] = _from_file("data.mean", given)["std"]
            given = config[key]
        values = [given] if isinstance(given, (int, float)) else list(given)
        if not values or not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values):
            raise DataError(f"data.{key}={given} must be numbers, the path of a statistics.json, or train")
        if len(values) not in (1, channels):
            raise DataError(f"data.{key} has {len(values)} numbers, but there are {channels} bands; give one for each")
        if key == "std" and min(values) <= 0:
            raise DataError(f"data.std={values} must be more than 0: values are divided by it")
        config[key] = values
    if config["mean"] == "train" and config["std"] is None:
        config["std"] = "train"
    if (config["mean"] is None) != (config["std"] is None) or (config["mean"] == "train") != (config["std"] == "train"):
        raise DataError(
            f"data.mean={_shown(config['mean'])}, but data.std={_shown(config['std'])}; give numbers for both, or "
            "data.mean=train alone"
        )


def _from_file(key: str, given: str) -> dict[str, Any]:
    path = Path(given).expanduser()
    if not path.exists():
        raise DataError(
            f"{key}={given} is neither numbers nor train, nor is there such a file; task=stats writes a statistics.json"
        )
    content = read_statistics(key, path)
    if "mean" not in content:
        raise DataError(f"{key}: {path} holds no mean; take one that task=stats or data.mean=train has written")
    return content


def _shown(value: Any) -> Any:
    return "null" if value is None else value if isinstance(value, (str, int, float)) else list(value)
