"""The rows of each split: the published schemes, sizes or shares, and dates; of one series, or of each of many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable

import numpy as np

from exp.errors import DataError

if TYPE_CHECKING:
    from exp.forecasting.keys import ForecastingDataConfig

_ROWS_PER_MONTH = {"ett_hour": 30 * 24, "ett_minute": 30 * 24 * 4}


def split_rows(
    config: ForecastingDataConfig, lengths: np.ndarray, rows_before: Callable[[str], np.ndarray]
) -> dict[str, np.ndarray]:
    """The rows of each split. The schemes are those of the published benchmarks (Informer, arXiv 2012.07436, and later
    papers).

    - ``ett_hour`` and ``ett_minute``: 12, 4 and 4 months of 30 days, hourly or every 15 minutes; later rows are unused.
    - ``ratio``: the first ``int(0.7 n)`` rows for training, the last ``int(0.2 n)`` for testing, the rest between them
      for validation.
    - ``pems``: the first 60 %, the next 20 % and the rest (the loaders of PEMS in SCINet, arXiv 2106.09305, and
      iTransformer, arXiv 2310.06625).
    - ``val_size`` and ``test_size``, or ``val_start`` and ``test_start``, instead of a scheme: the last ``test_size``
      rows (of each series) are for testing, and so on.
    - ``test_only``: all rows are for testing. They may be too few for a window, but not for a forecast of the rows
      after them.

    Validation and test begin ``lookback`` rows early, so that their first window forecasts the first row of the split;
    not with ``pems``, whose splits have no common rows.

    Args:
        config: the keys of ``data``.
        lengths: rows of each series, int64 (S,).
        rows_before: the number of rows of each series, (S,), that are before a date.

    Returns:
        For each split the first row of each series and the one after the last, int64 (S, 2), from 0 in each series;
        only ``test`` with ``test_only``.

    Raises:
        DataError: no series has a window of a split; the message has the rows of each split and the rows needed.
    """
    lookback, horizon, most = config.lookback, config.horizon, int(lengths.argmax())
    if config.split == "test_only":
        if lengths[most] < lookback:
            raise DataError(f"{lengths[most]} rows are too few: a forecast sees data.lookback={lookback} of them")
        return {"test": np.stack([np.zeros_like(lengths), lengths], axis=1)}
    end, overlap, sizes = lengths, lookback, size_keys(config)
    if sizes:
        test = (
            lengths - _size(config.test_size, lengths) if config.test_start is None else rows_before(config.test_start)
        )
        val = test - _size(config.val_size, lengths) if config.val_start is None else rows_before(config.val_start)
    elif config.split == "pems":  # 0.6 + 0.2, not 0.8, as in those loaders
        val, test, overlap = (0.6 * lengths).astype(np.int64), ((0.6 + 0.2) * lengths).astype(np.int64), 0
    elif config.split == "ratio":
        val, test = (lengths * 0.7).astype(np.int64), lengths - (lengths * 0.2).astype(np.int64)
    else:
        val, test, end = (np.full_like(lengths, months * _ROWS_PER_MONTH[config.split]) for months in (12, 16, 20))
    bounds = {"train": (0 * val, val), "val": (val - overlap, test), "test": (test - overlap, np.minimum(end, lengths))}
    rows = {name: np.stack([begin, stop], axis=1).clip(0) for name, (begin, stop) in bounds.items()}
    if (end > lengths).all() or any(not num_windows(part, lookback + horizon).any() for part in rows.values()):
        train, check, last = (max(0, int(part[most])) for part in (val, test - val, end - test))
        scheme = " ".join(f"data.{key}={value:g}" if isinstance(value, float) else f"data.{key}={value}"
                          for key, value in sizes.items())  # fmt: skip
        ratio = "" if sizes or config.split == "ratio" else "data.split=ratio, "
        raise DataError(
            f"{lengths[most]} rows are too few for {scheme or f'data.split={config.split}'}, which takes {train} for "
            f"training, {check} for validation and {last} for testing, with data.lookback={lookback} and "
            f"data.horizon={horizon}: training needs lookback + horizon rows, the others "
            f"{'horizon' if overlap else 'as many'}; take {ratio}a smaller window, or the whole file"
        )
    return rows


def size_keys(config: ForecastingDataConfig) -> dict[str, float | str]:
    """The keys that set sizes or dates of splits."""
    values = {key: getattr(config, key) for key in ("val_size", "val_start", "test_size", "test_start")}
    return {key: value for key, value in values.items() if value is not None}


def _size(size: float | None, lengths: np.ndarray) -> np.ndarray:
    """A number of rows for each series: ``size`` itself, or below 1 that share of its rows."""
    assert size is not None
    return np.asarray(lengths * size if size < 1 else np.full_like(lengths, size)).astype(np.int64)


def num_windows(rows: np.ndarray, length: int) -> np.ndarray:
    """The number of windows of ``length`` rows in each of some ranges, (S, 2); int64 (S,)."""
    return np.asarray((rows[:, 1] - rows[:, 0] - length + 1).clip(0))
