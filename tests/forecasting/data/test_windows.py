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
    dataset = WindowDataset(values, marks, range(11, 45), LOOKBACK, HORIZON, True)
    assert len(dataset) == 34 - 10 + 1
    index = torch.tensor([24, 0, 3, 3])
    begins = [11 + number for number in index.tolist()]
    expected = {
        "x": torch.stack([values[begin : begin + LOOKBACK] for begin in begins]),
        "marks": torch.stack([marks[begin : begin + LOOKBACK] for begin in begins]),
        "y": torch.stack([values[begin + LOOKBACK : begin + LOOKBACK + HORIZON] for begin in begins]),
        "index": index,
    }
    on_device = dataset.on_device(torch.device("cpu"), None)(dataset.numbers(index))
    torch.testing.assert_close(on_device, dataset[index], rtol=0, atol=0, check_stride=True)
    for found in (dataset[index], dataset[index.tolist()], pickle.loads(pickle.dumps(dataset))[index]):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert all(found[key].transpose(1, 2).is_contiguous() for key in ("x", "marks", "y"))
    assert dataset[[]]["x"].shape == (0, LOOKBACK, 5)
    for outside in (-1, 25):
        with pytest.raises(IndexError):
            dataset[[outside]]


@pytest.mark.parametrize(
    ("resident", "free", "there"),
    [(None, 16 * 40 * 9 * 4, True), (None, 16 * 40 * 9 * 4 - 1, False), (True, 0, True), (False, 2**40, False)],
)
def test_a_series_lies_on_the_device_where_it_is_small_beside_its_memory(data, resident, free, there):
    dataset = WindowDataset(*data, range(10, 50), LOOKBACK, HORIZON, resident)
    assert (dataset.on_device(torch.device("cpu"), free) is not None) is there
