"""Which rows of a series are for training, validation and testing."""

from __future__ import annotations

from exp.errors import DataError

__all__ = ["SPLITS", "TooFewRowsError", "borders"]

_PER_MONTH = {"ett_hour": 30 * 24, "ett_minute": 30 * 24 * 4}
SPLITS = (*_PER_MONTH, "ratio", "pems", "new")


class TooFewRowsError(DataError):
    """A series is too short for its split."""


def borders(split: str, num_rows: int, lookback: int, horizon: int) -> dict[str, range]:
    """The rows of each split, as in the published benchmarks (Informer, arXiv 2012.07436, and later papers).

    - ``ett_hour`` and ``ett_minute``: 12, 4 and 4 months of 30 days, hourly or every 15 minutes; later rows are unused.
    - ``ratio``: the first ``int(0.7 n)`` rows for training, the last ``int(0.2 n)`` for testing, the rest between them
      for validation.
    - ``pems``: the first 60 %, the next 20 % and the rest (the loaders of PEMS in SCINet, arXiv 2106.09305, and
      iTransformer, arXiv 2310.06625).
    - ``new``: all rows are for testing. They may be too few for a window, but not for a forecast of the rows after
      them.

    Validation and test begin ``lookback`` rows early, so that their first window forecasts the first row of the split;
    not with ``pems``, whose splits have no common rows.

    Args:
        split: one of :data:`SPLITS`.
        num_rows: rows of the series (n).
        lookback: input rows of a window.
        horizon: forecast rows of a window.

    Returns:
        ``{"train": range(first, last + 1), "val": ..., "test": ...}``, each with at least one window; only ``test``
        with ``new``.

    Raises:
        TooFewRowsError: a split has too few rows; the message has the rows of each split and the rows needed.
    """
    if split == "new":
        if num_rows < lookback:
            raise TooFewRowsError(f"{num_rows} rows are too few: a forecast sees data.lookback={lookback} of them")
        return {"test": range(num_rows)}
    early = lookback  # rows that validation and test share with the split before
    if split == "pems":
        train, known, end, early = int(0.6 * num_rows), int((0.6 + 0.2) * num_rows), num_rows, 0  # not 0.8: as there
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
