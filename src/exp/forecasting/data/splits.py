"""Which rows of a series are for training, validation and testing."""

from __future__ import annotations

from exp.errors import DataError

__all__ = ["SPLITS", "TooFewRowsError", "borders"]

_PER_MONTH = {"ett_hour": 30 * 24, "ett_minute": 30 * 24 * 4}
SPLITS = (*_PER_MONTH, "ratio", "pems", "new")


class TooFewRowsError(DataError):
    """A series is too short for its split."""


def borders(split: str, num_rows: int, lookback: int, horizon: int) -> dict[str, range]:
    """The rows of each split, as in the published benchmarks (Informer, arXiv 2012.07436, and those after it).

    ``ett_hour`` and ``ett_minute``: 12, 4 and 4 months of 30 days, hourly or every 15 minutes; what follows is unused.
    ``ratio``: ``int(0.7 n)`` rows, the rest, and the last ``int(0.2 n)``. Validation and test begin ``lookback`` rows
    early, so that their first window forecasts the first row of the split. ``pems``: the first 60 %, the next 20 % and
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
        TooFewRowsError: says how many each split has, and needs.
    """
    if split == "new":
        if num_rows < lookback:
            raise TooFewRowsError(f"{num_rows} rows are too few: a forecast sees data.lookback={lookback} of them")
        return {"test": range(num_rows)}
    early = lookback  # rows that validation and test share with the split before
    if split == "pems":
        train, known, end, early = int(0.6 * num_rows), int((0.6 + 0.2) * num_rows), num_rows, 0  # those loaders' sum
    elif split == "ratio":
        train, known, end = int(num_rows * 0.7), num_rows - int(num_rows * 0.2), num_rows
    else:
        train, known, end = (months * _PER_MONTH[split] for months in (12, 16, 20))
    parts = {"train": range(train), "val": range(train - early, known), "test": range(known - early, end)}
    if end > num_rows or train < early or min(map(len, parts.values())) < lookback + horizon:
        sizes = f"{train} for training, {known - train} for validation and {end - known} for testing"
        raise TooFewRowsError(
            f"{num_rows} rows are too few for data.split={split}, which takes {sizes}, with data.lookback={lookback} "
            f"and data.horizon={horizon}: training needs lookback + horizon rows, the others "
            f"{'horizon' if early else 'as many'}; take data.split=ratio, a smaller window, or the whole file"
        )
    return parts
