from __future__ import annotations

import re

import pytest

from exp.errors import DataError
from exp.forecasting.data.splits import borders


def test_ett():
    ends = {"train": range(8640), "val": range(8640 - 720, 11520), "test": range(11520 - 720, 14400)}
    assert borders("ett_hour", 17420, 720, 96) == ends
    assert borders("ett_minute", 69680, 96, 96)["test"] == range(46080 - 96, 57600)


@pytest.mark.parametrize(
    ("num_rows", "train", "val", "test"),
    # Rows of weather, solar and national illness; 0.7 * 10 is just below 7 in no arithmetic that Python has.
    [(52696, 36887, 5270, 10539), (52560, 36792, 5256, 10512), (966, 676, 97, 193), (10, 7, 1, 2)],
)
def test_ratio(num_rows, train, val, test):
    expected = {"train": range(train), "val": range(train - 2, train + val), "test": range(train + val - 2, num_rows)}
    assert num_rows == train + val + test
    assert borders("ratio", num_rows, 2, 1) == expected


def test_just_enough_rows_and_too_few():
    parts = borders("ratio", 100, 60, 10)  # 70 rows for training, 10 for validation
    assert [len(rows) - 70 + 1 for rows in parts.values()] == [1, 1, 11]
    for split, num_rows, lookback, horizon, named in (
        ("ratio", 100, 61, 10, "lookback"),
        ("ratio", 100, 50, 11, "horizon"),
        ("ett_hour", 14399, 96, 1, "data.split=ratio"),
        ("ett", 20000, 96, 1, "data.split=ett "),
        ("ratio", 100, 0, 1, "data.lookback=0"),
    ):
        with pytest.raises(DataError, match=named):
            borders(split, num_rows, lookback, horizon)
    with pytest.raises(DataError) as error:
        borders("ratio", 100, 96, 24)
    enough = int(re.search(r"(\d+) rows would do", str(error.value))[1])
    assert borders("ratio", enough, 96, 24)
    with pytest.raises(DataError):
        borders("ratio", enough - 1, 96, 24)
