"""What of the bands and their values goes from a run to those that use its weights."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Mapping

from exp.errors import DataError
from exp.vision.data.bands import colours_in
from exp.vision.data.normalisation import limits_of

if TYPE_CHECKING:
    from exp.vision.data.normalisation import Normalisation
    from exp.vision.data.reader import ImageReader

__all__ = ["adopt", "record_of", "refuse_another_order", "state_of"]

logger = logging.getLogger(__name__)


def state_of(reader: ImageReader, normalisation: Normalisation) -> dict[str, Any]:
    """What of it belongs to weights; only what there is."""
    state: dict[str, Any] = {}
    bands = reader.bands
    if bands is not None:
        state.update(bands=list(bands.wanted), band_names=list(normalisation.names), band_count=bands.expected)
    if normalisation.mean is not None:
        state.update(mean=normalisation.mean, std=normalisation.std, scaled=normalisation.scaled)
    if reader.modalities.state():
        state["modality_statistics"] = reader.modalities.state()
    return state


def record_of(reader: ImageReader, normalisation: Normalisation) -> dict[str, Any]:
    """What of it ``result.json`` says; only what there is."""
    record: dict[str, Any] = {}
    if not reader.is_measured and reader.value_range is not None:
        record["value_range"] = limits_of(reader.value_range)
    if reader.bands is not None:
        record["bands"] = normalisation.names or list(reader.bands.wanted)
    if normalisation.mean is not None:
        record.update(mean=normalisation.mean, std=normalisation.std)
    return record


def adopt(reader: ImageReader, normalisation: Normalisation, state: Mapping[str, Any]) -> None:
    """Read files as those that weights were trained on; other bands are told, their number has been compared.

    Args:
        reader: of the data.
        normalisation: of the data.
        state: :meth:`exp.vision.data.base.ImageData.state` of the data that the weights were trained on.

    Raises:
        DataError: the weights had the mean and standard deviation of the model, and others are given.
    """
    _adopt_bands(reader, normalisation, state)
    _adopt_mean(normalisation, state)
    if "channels" in state:
        reader.modalities.take(state.get("modality_statistics") or {})
    if "value_range" not in state:
        return
    limits = limits_of(state["value_range"])
    if reader.is_measured or reader.value_range is None:
        reader.value_range = limits
    elif limits is not None and limits_of(reader.value_range) != limits:
        given = list(reader.value_range)
        logger.warning("data.value_range=%s, but the weights were trained with %s", given, limits)


def _adopt_bands(reader: ImageReader, normalisation: Normalisation, state: Mapping[str, Any]) -> None:
    bands, theirs = reader.bands, state.get("bands")
    wanted = None if bands is None else bands.wanted
    if bands is not None and theirs is not None and list(theirs) == wanted:
        bands.expected = state.get("band_count")
        normalisation.names = list(state.get("band_names") or ())
    elif wanted != theirs and "channels" in state:
        logger.warning("data.bands=%s, but the weights were trained with %s", wanted, theirs)


def _adopt_mean(normalisation: Normalisation, state: Mapping[str, Any]) -> None:
    own, theirs = normalisation.mean, state.get("mean")
    if theirs is None and "channels" in state and (own is not None or normalisation.is_measured):
        raise DataError(
            "the weights were trained with the mean and standard deviation of the model, but data.mean is set "
            "here; leave it out (data.mean=null data.std=null)"
        )
    if own is not None and theirs is not None and list(own) != list(theirs):
        logger.warning("data.mean=%s, but the weights were trained with %s, which is used", own, list(theirs))
    normalisation.scaled = bool(state.get("scaled", True))
    normalisation.take({"mean": theirs, "std": state.get("std")})


def refuse_another_order(reader: ImageReader, state: Mapping[str, Any], band_init: str | None) -> None:
    """Refuse to train on the bands of the weights in another order: nothing else would tell.

    Args:
        reader: of the data.
        state: of the data that the weights were trained on.
        band_init: ``model.band_init``, where more bands than those of the weights begin with kernels of red, green and
            blue.

    Raises:
        DataError: names both.
    """
    theirs = list(state.get("band_names") or ())
    if not theirs or reader.bands is None:
        return
    mine = reader.example().names
    if mine != theirs and sorted(mine) == sorted(theirs):
        raise DataError(
            f"init_from: the weights were trained on the bands {', '.join(theirs)}, but data.bands gives "
            f"{', '.join(mine)}; give them in the same order"
        )
    if len(mine) != len(theirs) == 3 and colours_in(theirs) != [0, 1, 2] and band_init not in (None, "mean"):
        raise DataError(
            f"init_from: the weights were trained on the bands {', '.join(theirs)}, not on red, green and blue, whose "
            f"kernels model.band_init={band_init} hands on; set model.band_init=mean"
        )
