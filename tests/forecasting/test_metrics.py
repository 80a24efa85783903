"""Errors of standardised values and in the units of the file: exact, for any split into batches and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exp.engine.distributed import Distributed
from exp.errors import DataError
from exp.forecasting.metrics import ForecastMetrics


@pytest.mark.parametrize("largest", [1e25, 1e-25])
def test_both_units_against_float64(largest):
    generator = torch.Generator().manual_seed(0)
    truth, outputs = (torch.randn(23, 5, 3, generator=generator) for _ in range(2))
    std = torch.tensor([0.01, 1.0, 0.3], dtype=torch.float64) * largest
    error = (outputs.double() - truth.double()).numpy()
    in_file = error * std.numpy()
    expected = {"mse": (error**2).mean(), "mae": np.abs(error).mean(),
                "mse_file_units": (in_file**2).mean(), "mae_file_units": np.abs(in_file).mean()}  # fmt: skip
    results = []
    for size in (23, 7, 1):
        metrics = ForecastMetrics(["a", "b", "c"], std)
        for begin in range(0, 23, size):
            metrics.update(outputs[begin : begin + size], {"y": truth[begin : begin + size]})
        results.append(metrics.compute(Distributed()))
        assert results[-1] == pytest.approx(expected, rel=1e-6)
        assert results[-1] == pytest.approx(results[0], rel=1e-9)
    channels, steps = metrics.tables()
    assert channels.columns["mse_file_units"] == pytest.approx((in_file**2).mean(axis=(0, 1)), rel=1e-6)
    assert steps.columns["mae_file_units"] == pytest.approx(np.abs(in_file).mean(axis=(0, 2)), rel=1e-6)


def test_ranks_of_which_one_has_no_window(ranks):
    script = """
    import torch
    from exp.forecasting.intervals.intervals import Intervals
    from exp.forecasting.intervals.metrics import IntervalMetrics
    from exp.forecasting.metrics import ForecastMetrics
    mean, std = torch.zeros(2).double(), torch.tensor([2.0, 4.0]).double()
    intervals = Intervals("residuals", [0.5], [0.25, 0.5, 0.75], torch.tensor([-1.0, 0.0, 1.0]).view(-1, 1, 1))
    errors, sure = ForecastMetrics(["a", "b"], std), IntervalMetrics(intervals, ["a", "b"], mean, std)
    if rank == 0:
        errors.update(torch.ones(3, 5, 2), {"y": torch.zeros(3, 5, 2)})
        truth = torch.arange(30.0).view(3, 5, 2) % 5 - 2
        sure.update(torch.zeros_like(truth), {"y": truth})
    group = join()
    print(json.dumps([errors.compute(group), errors.tables()[0].columns["mse_file_units"], sure.compute(group),
                      sure.tables()[1].columns["coverage_50"]]))
    """
    for totals, channels, sure, steps in ranks(script, world_size=2):
        assert totals == {"mse": 1.0, "mae": 1.0, "mse_file_units": 10.0, "mae_file_units": 3.0}
        assert channels == [4.0, 16.0]
        assert (sure["coverage_50"], sure["width_50"]) == (pytest.approx(0.6), 2.0)  # -1, 0 and 1 of -2 to 2
        assert np.mean(steps) == pytest.approx(0.6)


def test_no_window_at_all_is_refused():
    with pytest.raises(DataError):
        ForecastMetrics(None, torch.ones(2, dtype=torch.float64)).compute(Distributed())
