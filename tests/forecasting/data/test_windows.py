from __future__ import annotations

import pickle

import pytest
import torch

from exp.forecasting.data.windows import WindowDataset

LOOKBACK, HORIZON = 7, 3


@pytest.fixture
def data():
    return torch.randn(5, 50).t(), torch.randn(4, 50).t()


def test_equals_a_loop_over_windows(data):
    values, marks = data
    rows = range(11, 45)
    dataset = WindowDataset(values, marks, rows, LOOKBACK, HORIZON)
    assert len(dataset) == 34 - 10 + 1
    index = torch.tensor([24, 0, 3, 3])
    batch = dataset[index]
    for number, window in enumerate(index.tolist()):
        begin = rows.start + window
        assert torch.equal(batch["x"][number], values[begin : begin + LOOKBACK])
        assert torch.equal(batch["marks"][number], marks[begin : begin + LOOKBACK])
        assert torch.equal(batch["y"][number], values[begin + LOOKBACK : begin + LOOKBACK + HORIZON])
    assert torch.equal(batch["index"], index)


def test_other_ways_to_ask(data):
    dataset = WindowDataset(*data, range(50), LOOKBACK, HORIZON)
    for key, value in pickle.loads(pickle.dumps(dataset))[[4, 2]].items():
        assert torch.equal(value, dataset[torch.tensor([4, 2])][key])
    assert dataset[[]]["x"].shape == (0, LOOKBACK, 5)
    assert all(dataset[[0, 1]][key].transpose(1, 2).is_contiguous() for key in ("x", "marks", "y"))
    for index in (-1, 41):
        with pytest.raises(IndexError):
            dataset[[index]]


def test_parts_share_memory(data):
    values, marks = data
    parts = [WindowDataset(values, marks, rows, LOOKBACK, HORIZON) for rows in (range(20), range(13, 50))]
    values[15] = 100.0
    assert parts[0][[10]]["x"][0, 5].tolist() == [100.0] * 5
    assert parts[1][[0]]["x"][0, 2].tolist() == [100.0] * 5


def test_a_device_cuts_the_same_batches(data):
    dataset, index = WindowDataset(*data, range(10, 50), 7, 3, True), torch.tensor([30, 0, 4, 4])
    cut = dataset.on_device(torch.device("cpu"), None)
    torch.testing.assert_close(cut(dataset.numbers(index)), dataset[index], rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize(
    ("resident", "free", "there"),
    [(None, 16 * 40 * 9 * 4, True), (None, 16 * 40 * 9 * 4 - 1, False), (True, 0, True), (False, 2**40, False)],
)
def test_a_series_lies_on_the_device_where_it_is_small_beside_its_memory(data, resident, free, there):
    dataset = WindowDataset(*data, range(10, 50), 7, 3, resident)
    assert (dataset.on_device(torch.device("cpu"), free) is not None) is there
