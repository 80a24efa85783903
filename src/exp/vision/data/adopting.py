"""What of the bands and their values goes from a run to those that use its weights."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from exp.data.places import shortened
from exp.errors import DataError
from exp.vision.data.bands import colours_in
from exp.vision.data.normalisation import limits_of

if TYPE_CHECKING:
    from exp.engine.fit import Weights
    from exp.session import Session
    from exp.vision.data.base import ImageData
    from exp.vision.data.normalisation import Normalisation
    from exp.vision.data.reader import ImageReader

__all__ = ["adopt", "begin_with", "fit_classes", "other_classes", "record_of", "refuse_another_order", "state_of"]

_CLASS_ROWS = re.compile(r"^(auxiliary_)?head\.(classify\.)?(weight|bias)$")
"""Tensors of a head (:mod:`exp.vision.dinov3`) whose rows are classes."""

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
    """Read files as those that weights were trained on; other bands are told.

    Args:
        reader: of the data.
        normalisation: of the data.
        state: :meth:`exp.vision.data.base.ImageData.state` of the data that the weights were trained on.

    Raises:
        DataError: the weights had other channels, or the mean and standard deviation of the model, and others are
            given.
    """
    channels = state.get("channels")
    if channels is not None and channels != reader.channels:
        raise DataError(
            f"the weights were trained with data.channels={channels}, but it is {reader.channels} here; set "
            f"data.channels={channels}"
        )
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


def other_classes(theirs: Sequence[str] | None, mine: Sequence[str], key: str) -> DataError | None:
    """What to say where weights that are to tell classes know others than the data have; None: they know these.

    Args:
        theirs: in the order of the head's rows; None: not known.
        mine: those of the data.
        key: of the configuration, that orders them.
    """
    if theirs is None or list(theirs) == list(mine):
        return None
    said = "them in another order" if sorted(theirs) == sorted(mine) else f"{len(mine)}"
    return DataError(
        f"the weights know the {len(theirs)} classes {shortened(theirs)}, but the data have {said}: {shortened(mine)}; "
        f"use the data that the weights were trained on, or give the same classes in the same order ({key})"
    )


def begin_with(session: Session, data: ImageData) -> None:
    """Compare the weights that a training begins with with its data.

    Args:
        session: has weights, which become those with the classes of the data (:func:`fit_classes`).
        data: of the training.

    Raises:
        DataError: the same bands are in another order.
    """
    weights = session.weights
    assert weights is not None
    refuse_another_order(data.read, weights.data or {}, session.config.model.get("band_init"))
    if data.learns_classes:
        session.weights = fit_classes(weights, data.classes, session.say)


def fit_classes(weights: Weights, classes: Sequence[str], say: Callable[[str], None]) -> Weights:
    """Weights to begin a training with, whose head has the classes of the data, by name.

    The same classes in another order: the rows of the head are put into the order of the data. As many others: its last
    layer is left out, and begins anew, as it does for another number of them.

    Args:
        weights: of another run.
        classes: of the data.
        say: shows a line.
    """
    theirs = list((weights.data or {}).get("classes") or ())
    rows = {key for key, value in weights.state.items() if _CLASS_ROWS.match(key) and value.shape[:1] == (len(theirs),)}
    if theirs == list(classes) or len(theirs) != len(classes) or not rows:
        return weights
    state = {key: value for key, value in weights.state.items() if key not in rows}
    if sorted(theirs) == sorted(classes):
        order = [theirs.index(name) for name in classes]
        state.update({key: weights.state[key][order] for key in sorted(rows)})
        say(f"init_from: the weights know the same {len(theirs)} classes in another order; the head's rows go by name")
    else:
        say(
            f"init_from: the weights know other classes ({shortened(theirs)}) than the data have "
            f"({shortened(classes)}); the head's last layer begins anew"
        )
    return dataclasses.replace(weights, state=state)
