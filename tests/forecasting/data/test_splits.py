from __future__ import annotations

import pytest

from exp.errors import DataError
from exp.forecasting.data.splits import borders


def test_ett():
    assert borders("ett_hour", 17420, 720, 96) == {
        "train": range(8640),
        "val": range(8640 - 720, 11520),
        "test": range(11520 - 720, 14400),
    }
    assert borders("ett_minute", 69680, 96, 96)["test"] == range(46080 - 96, 57600)


@pytest.mark.parametrize(
    ("num_rows", "train", "val", "test"),
    # Rows of weather, solar and national illness; 0.7 * 10 is just below 7 in no arithmetic that Python has.
    [(52696, 36887, 5270, 10539), (52560, 36792, 5256, 10512), (966, 676, 97, 193), (10, 7, 1, 2)],
)
def test_ratio(num_rows, train, val, test):
    parts = borders("ratio", num_rows, 2, 1)
    assert parts["train"] == range(train)
    assert parts["val"] == range(train - 2, train + val)
    assert parts["test"] == range(num_rows - test - 2, num_rows)


def test_just_enough_rows():
    parts = borders("ratio", 100, 60, 10)  # 70 rows for training, 10 for validation
    assert [len(rows) - 70 + 1 for rows in parts.values()] == [1, 1, 11]


@pytest.mark.parametrize(("lookback", "horizon"), [(61, 10), (50, 11)])
def test_too_few_rows(lookback, horizon):
    with pytest.raises(DataError) as error:
        borders("ratio", 100, lookback, horizon)
    first = str(error.value).splitlines()[0]
    for part in (
        f"data.lookback={lookback} and data.horizon={horizon}",
        "70 for training, 10 for validation and 20 for testing",
        "lookback + horizon can be at most 70, the horizon at most 10",
    ):
        assert part in first


@pytest.mark.parametrize(
    ("split", "num_rows", "lookback", "what"),
    [
        ("ett_hour", 14399, 96, "needs 14400 rows, but the series has 14399; set data.split=ratio"),
        ("ett", 20000, 96, "data.split=ett is not one of"),
        ("ratio", 100, 0, "data.lookback=0"),
    ],
)
def test_refusals(split, num_rows, lookback, what):
    with pytest.raises(DataError, match=what):
        borders(split, num_rows, lookback, 1)
