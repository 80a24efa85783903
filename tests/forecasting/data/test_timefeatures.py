from __future__ import annotations

import numpy as np
import pandas as pd

from exp.forecasting.data.timefeatures import time_features


def test_scaled_calendar():
    # A Friday at 12, the last second of a leap year (a Saturday), and the first of a year (a Monday).
    dates = pd.DatetimeIndex(["2016-07-01 12:45:00", "2016-12-31 23:59:59", "2018-01-01 00:00:00"])
    expected = [[12 / 23 - 0.5, 4 / 6 - 0.5, -0.5, 182 / 365 - 0.5], [0.5, 5 / 6 - 0.5, 0.5, 0.5], [-0.5] * 4]
    for features, values in ((time_features(dates, 3), expected), (time_features(None, 3), np.zeros((3, 4)))):
        assert features.dtype == np.float32
        np.testing.assert_allclose(features, values, atol=1e-7)
