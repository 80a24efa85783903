"""What of the bands and their values goes from a run to those that use its weights."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Mapping

from exp.errors import DataError
from exp.vision.data.bands import colours_in

if TYPE_CHECKING:
    from exp.vision.data.normalisation import Normalisation
    from exp.vision.data.reader import ImageReader

__all__ = ["adopt_bands", "adopt_normalisation", "refuse_another_order"]

logger = logging.getLogger(__name__)


def adopt_bands(reader: ImageReader, normalisation: Normalisation, state: Mapping[str, Any]) -> None:
    """Read files as those that weights were trained on; other bands are told, their number has been compared.

    Args:
        reader: of the data.
        normalisation: of the data.
        state: :meth:`exp.vision.data.base.ImageData.state` of the data that the weights were trained on.
    """
    bands, theirs = reader.bands, state.get("bands")
    wanted = None if bands is None else bands.wanted
    if bands is not None and theirs is not None and list(theirs) == wanted:
        bands.expected = state.get("band_count")
        normalisation.names = list(state.get("band_names") or ())
    elif wanted != theirs and "channels" in state:
        logger.warning("data.bands=%s, but the weights were trained with %s", wanted, theirs)


def adopt_normalisation(normalisation: Normalisation, state: Mapping[str, Any]) -> None:
    """Take mean and standard deviation from the weights.

    Raises:
        DataError: the weights had those of the model, and others are given.
    """
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
