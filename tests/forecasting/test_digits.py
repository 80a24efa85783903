from __future__ import annotations

import numpy as np
import pytest

from exp.forecasting.digits import shortest_texts


@pytest.mark.parametrize(("mean", "std"), [(1e9 + 20, 2.0), (10.0, 3.0), (2e-31, 1e-30), (0.0, 1.0), (-5e30, 1e30)])
def test_text_gives_the_standardised_number_back(mean, std):
    told = np.random.default_rng(0).normal(size=(200, 1)).astype(np.float32)
    values = told.astype(np.float64) * std + mean
    texts = shortest_texts(values, np.array([mean]), np.array([std]))
    read = np.array([[float(text) for text in row] for row in texts])
    again, expected = (((each - mean) / std).astype(np.float32) for each in (read, values))
    assert np.array_equal(again, expected)
    assert len({text for row in texts for text in row}) == 200


def test_truth_reads_as_in_the_file():
    written = ["10.123", "9.87", "10", "34.5678", "nan"]
    mean, std = np.array([10.04]), np.array([2.12])
    standardised = ((np.array([[float(text)] for text in written]) - mean) / std).astype(np.float32)
    texts = shortest_texts(standardised.astype(np.float64) * std + mean, mean, std)[:, 0].tolist()
    assert texts == [*written[:-1], ""]
