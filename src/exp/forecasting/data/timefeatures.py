"""Time features: where in its day, week, month and year a row lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["NUM_TIME_FEATURES", "time_features"]

NUM_TIME_FEATURES = 4


def time_features(dates: pd.DatetimeIndex | None, num_rows: int) -> np.ndarray:
    """Hour of the day, day of the week, of the month and of the year, each scaled to [-0.5, 0.5].

    The convention of GluonTS (Alexandrov et al., arXiv 1906.05264) for hourly data. Published TimeBridge runs use these
    four for every data set, those in minutes too.

    Args:
        dates: of the rows; None: not known.
        num_rows: number of rows (T), the length of ``dates`` where there are any.

    Returns:
        float32 (T, 4); zeros where there are no dates.
    """
    if dates is None:
        return np.zeros((num_rows, NUM_TIME_FEATURES), dtype=np.float32)
    features = [
        dates.hour / 23 - 0.5,
        dates.day_of_week / 6 - 0.5,
        (dates.day - 1) / 30 - 0.5,
        (dates.day_of_year - 1) / 365 - 0.5,
    ]
    return np.stack([np.asarray(feature) for feature in features], axis=1).astype(np.float32)
