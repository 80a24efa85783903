"""Which rows of a series are for training, validation and testing."""

from __future__ import annotations

from itertools import count

from exp.errors import DataError

__all__ = ["SPLITS", "TooFewRowsError", "borders", "check_split"]

SPLITS = ("ett_hour", "ett_minute", "ratio", "pems", "new")

_ETT_MONTHS = (12, 4, 4)
_ROWS_PER_MONTH = {"ett_hour": 30 * 24, "ett_minute": 30 * 24 * 4}


class TooFewRowsError(DataError):
    """A series is too short for its split."""


def borders(split: str, num_rows: int, lookback: int, horizon: int) -> dict[str, range]:
    """The rows of each part, as in the published benchmarks (Informer, arXiv 2012.07436, and those after it).

    ``ett_hour`` and ``ett_minute``: 12, 4 and 4 months of 30 days, hourly or every 15 minutes; what follows is unused.
    ``ratio``: ``int(0.7 n)`` rows, the rest, and the last ``int(0.2 n)``. Validation and test begin ``lookback`` rows
    early, so that their first window forecasts the first row of the part. ``pems``: the first 60 %, the next 20 % and
    the rest, which share no row: the first window forecasts ``lookback`` rows later (the loaders of PEMS in SCINet,
    arXiv 2106.09305, and iTransformer, arXiv 2310.06625). ``new``: all rows are for testing; they may be too few for a
    window, but not for a forecast of what follows them.

    Args:
        split: one of :data:`SPLITS`.
        num_rows: rows of the series (n).
        lookback: rows that a forecast sees.
        horizon: rows that it forecasts.

    Returns:
        ``{"train": range(first, last + 1), "val": ..., "test": ...}``, each with at least one window; of ``new`` only
        ``test``.

    Raises:
        DataError: no such split, or lookback or horizon below 1.
        TooFewRowsError: says how many would do.
    """
    check_split(split)
    if lookback < 1 or horizon < 1:
        raise DataError(f"data.lookback={lookback} and data.horizon={horizon} must both be at least 1")
    if split == "new":
        if num_rows < lookback:
            raise TooFewRowsError(f"{num_rows} rows are too few: a forecast sees data.lookback={lookback} of them")
        return {"test": range(num_rows)}
    if split == "pems":
        return _disjoint(num_rows, lookback, horizon)
    if split == "ratio":
        num_train, num_val, num_test = _shares(num_rows)
    else:
        num_train, num_val, num_test = (months * _ROWS_PER_MONTH[split] for months in _ETT_MONTHS)
        if num_train + num_val + num_test > num_rows:
            raise TooFewRowsError(
                f"data.split={split} needs {num_train + num_val + num_test} rows, but the series has {num_rows}; "
                "set data.split=ratio, or take the whole file"
            )
    if num_train < lookback + horizon or min(num_val, num_test) < horizon:
        most = min(num_val, num_test)
        enough = f"; {_least_rows(lookback, horizon)} rows would do" if split == "ratio" else ""
        raise TooFewRowsError(
            f"too few rows for data.lookback={lookback} and data.horizon={horizon}: of {num_rows}, data.split={split} "
            f"gives {num_train} for training, {num_val} for validation and {num_test} for testing; "
            f"lookback + horizon can be at most {num_train}, the horizon at most {most}{enough}"
        )
    num_known = num_train + num_val
    return {
        "train": range(num_train),
        "val": range(num_train - lookback, num_known),
        "test": range(num_known - lookback, num_known + num_test),
    }


def _disjoint(num_rows: int, lookback: int, horizon: int) -> dict[str, range]:
    """The parts of ``pems``."""
    first, second = int(0.6 * num_rows), int((0.6 + 0.2) * num_rows)  # summed so by those loaders
    parts = {"train": range(first), "val": range(first, second), "test": range(second, num_rows)}
    if min(map(len, parts.values())) < lookback + horizon:
        raise TooFewRowsError(
            f"too few rows for data.lookback={lookback} and data.horizon={horizon}: of {num_rows}, data.split=pems "
            f"gives {' / '.join(str(len(part)) for part in parts.values())} rows for training, validation and "
            "testing, and each needs lookback + horizon"
        )
    return parts


def _shares(num_rows: int) -> tuple[int, int, int]:
    """Rows for training, validation and testing of ``ratio``."""
    num_train, num_test = int(num_rows * 0.7), int(num_rows * 0.2)
    return num_train, num_rows - num_train - num_test, num_test


def _least_rows(lookback: int, horizon: int) -> int:
    """The fewest rows that ``ratio`` splits."""
    for num_rows in count(lookback + horizon):
        num_train, num_val, num_test = _shares(num_rows)
        if num_train >= lookback + horizon and min(num_val, num_test) >= horizon:
            break
    return num_rows


def check_split(split: str) -> None:
    """Refuse an unknown split.

    Raises:
        DataError: it is not one of :data:`SPLITS`.
    """
    if split not in SPLITS:
        raise DataError(f"data.split={split} is not one of {', '.join(SPLITS)}")
