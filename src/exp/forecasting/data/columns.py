"""Which columns of a file are read, which are forecast, which are known ahead. Imports neither torch nor pandas."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, NamedTuple, Sequence

from exp.data.places import shortened
from exp.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from exp.forecasting.config import ForecastingDataConfig

__all__ = ["MISSING", "Columns", "choose"]

MISSING = ("refuse", "mask")


class Columns(NamedTuple):
    """The columns of a file by their use; keys of ``data`` are in parentheses.

    Attributes:
        names: the C columns that are read (``inputs``).
        scored: positions in ``names`` of the columns that are forecast and scored (``targets``).
        ahead: positions in ``names`` of the columns whose future is known (``covariates``); None: the key is null.
    """

    names: list[str]
    scored: list[int]
    ahead: list[int] | None


def choose(path: Path, series: Sequence[str], config: ForecastingDataConfig) -> Columns:
    """Choose the columns that the configuration names.

    Args:
        path: of the file, for messages.
        series: names of all series of the file.
        config: ``inputs``, ``targets``, ``covariates`` and ``channels`` are read.

    Raises:
        DataError: a name does not exist or occurs twice; a column is both target and covariate; no column is left to be
            forecast; or ``channels`` is not the number of columns that are read.
    """
    names = _named(path, "inputs", config.inputs, series)
    if config.channels != len(names):
        what = "has" if config.inputs is None else "data.inputs names"
        raise DataError(
            f"{path}: {what} {len(names)} series ({shortened(names)}), but data.channels={config.channels}; set "
            f"data.channels={len(names)}, take the right file, or name those to be read in data.inputs: with trained "
            "weights those of the training, in their order"
        )
    targets = _named(path, "targets", config.targets, names)
    ahead = [] if config.covariates is None else _named(path, "covariates", config.covariates, names)
    both = [name for name in ahead if name in targets and config.targets is not None]
    if both:
        raise DataError(f"{both[0]!r} is in data.targets and in data.covariates; what is known is not forecast")
    scored = [position for position, name in enumerate(names) if name in targets and name not in ahead]
    if not scored:
        raise DataError(f"{path}: data.targets={targets} and data.covariates={ahead} leave no column to be forecast")
    known = None if config.covariates is None else [names.index(name) for name in ahead]
    return Columns(names, scored, known)


def _named(path: Path, key: str, wanted: Sequence[object] | None, there: Sequence[str]) -> list[str]:
    """The names of a key, checked against the existing ones; all existing ones if the key is null."""
    names = list(there) if wanted is None else [str(name).strip() for name in wanted]
    for number, name in enumerate(names):
        if name not in there:
            near = difflib.get_close_matches(name, there, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            of_weights = ", which the weights were trained on or you have named," if key == "inputs" else ""
            raise DataError(
                f"data.{key}: {name!r}{of_weights} is not among the series of {path}: {shortened(there)}{hint}"
            )
        if name in names[:number]:
            raise DataError(f"data.{key} has {name!r} twice; name each column once")
    return names
