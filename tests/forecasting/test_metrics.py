"""Errors of standardized values and in the units of the file: exact, for any split into batches and ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exp.distributed import Distributed
from exp.forecasting.interval_metrics import IntervalMetrics
from exp.forecasting.intervals import Intervals
from exp.forecasting.metrics import Baselines, ForecastMetrics
from exp.forecasting.outputs import Points


@pytest.mark.parametrize("largest", [1e25, 1e-25])
@pytest.mark.parametrize("missing", [False, True])
def test_both_units_against_float64(largest, missing):
    """Also where some truth is missing and the second of three series is not forecast."""
    generator = torch.Generator().manual_seed(0)
    truth, outputs = (torch.randn(23, 5, 3, generator=generator) for _ in range(2))
    std = torch.tensor([0.01, 1.0, 0.3], dtype=torch.float64) * largest
    names, scored = ["a", "b", "c"], [0, 1, 2]
    if missing:
        truth[torch.rand(truth.shape, generator=generator) < 0.3] = np.nan
        names, scored = ["a", "c"], [0, 2]
    error = (outputs.double() - truth.double())[..., scored].numpy()
    in_file = error * std[scored].numpy()
    expected = {"mse": np.nanmean(error**2), "mae": np.nanmean(np.abs(error)),
                "mse_file_units": np.nanmean(in_file**2), "mae_file_units": np.nanmean(np.abs(in_file))}  # fmt: skip
    # What errors are compared with: the last value, the last two rows again and again, and a scale for each series.
    x = torch.randn(23, 4, 3, generator=generator)
    scale = torch.tensor([2.0, 7.0, 0.5], dtype=torch.float64)
    for name, rows in (("naive", [3, 3, 3, 3, 3]), ("seasonal_naive", [2, 3, 2, 3, 2])):
        other = (x[:, rows].double() - truth.double())[..., scored].numpy()
        expected.update({f"mse_{name}": np.nanmean(other**2), f"mae_{name}": np.nanmean(np.abs(other))})
    expected["mase"] = np.nanmean(np.abs(error) / scale[scored].numpy())
    baselines = Baselines(2, seasonal=True, scale=scale)
    results = []
    for size in (23, 7, 1):
        metrics = ForecastMetrics(["a", "b", "c"], std, scored if missing else None, baselines)
        for index in torch.arange(23).split(size):
            batch = {"x": x[index], "y": truth[index], "observed": (~truth[index].isnan()).float()}
            metrics.update(outputs[index], batch)
        results.append(metrics.compute(Distributed()))
        assert results[-1] == pytest.approx(expected, rel=1e-6)
        assert results[-1] == pytest.approx(results[0], rel=1e-9)
    channels, steps = metrics.tables()
    assert channels.rows == names
    assert channels.columns["mse_file_units"] == pytest.approx(np.nanmean(in_file**2, axis=(0, 1)), rel=1e-6)
    assert steps.columns["mae_file_units"] == pytest.approx(np.nanmean(np.abs(in_file), axis=(0, 2)), rel=1e-6)


@pytest.mark.parametrize("kind", ["errors", "errors where there is a truth", "intervals"])
def test_a_rank_without_a_window_has_the_figures_of_all(kind):
    mean, std = torch.zeros(2).double(), torch.tensor([2.0, 4.0]).double()
    intervals = Intervals(Points(), [0.5], [0.25, 0.5, 0.75], torch.tensor([-1.0, 0.0, 1.0]).view(-1, 1, 1))
    names = ["a", "b"]
    make = {
        "errors": lambda: ForecastMetrics(names, std),
        "errors where there is a truth": lambda: ForecastMetrics(names, std, [0, 1]),
        "intervals": lambda: IntervalMetrics(intervals, names, mean, std),
    }[kind]
    full, empty = make(), make()
    full.update(torch.zeros(3, 5, 2), {"y": torch.randn(3, 5, 2), "observed": torch.ones(3, 5, 2)})
    given: list = []  # what the first rank hands in, which the second one gets
    alone = {
        "sum": lambda value: given.append(value.clone()) or value,
        "gather": lambda value: given.append(value) or [value],
    }
    expected, others = full.compute(SimpleNamespace(**alone)), iter(given)
    beside = {"sum": lambda value: value.add_(next(others)), "gather": lambda value: [value, next(others)]}
    assert empty.compute(SimpleNamespace(**beside)) == expected
    assert [table.columns for table in empty.tables()] == [table.columns for table in full.tables()]


def test_what_is_worse_than_a_baseline_is_named():
    x = torch.tensor([1.0, 2.0]).view(1, 2, 1)
    for forecast, named in (
        (2.0, None),
        (2.4, "the last value (0)"),
        (3.5, "the last value (0) and repeating the last 2 rows (0.5) and the mean of the lookback (0.25)"),
    ):
        baselines = Baselines(2, seasonal=True, scale=torch.zeros(1).double())
        metrics = ForecastMetrics(baselines=baselines)
        metrics.update(torch.full((1, 2, 1), forecast), {"x": x, "y": torch.full((1, 2, 1), 2.0)})
        assert "mase" not in metrics.compute(Distributed())  # a constant series has no scale
        assert named is None if baselines.verdict is None else f"worse than repeating {named}:" in baselines.verdict


def test_the_verdict_knows_the_mean_and_zero_for_counts():
    """What is 0 in the file is another value, standardized."""
    x, y = torch.tensor([1.0, 0.0, 0.0, 3.0]).view(1, 4, 1), torch.tensor([0.0, 0.0, 2.0]).view(1, 3, 1)
    for zero, verdict in (
        (None, "worse than the mean of the lookback (1): MSE 2"),
        (torch.tensor([0.25]).double(), "worse than the mean of the lookback (1) and zero (1.062): MSE 2"),
    ):
        baselines = Baselines(1, seasonal=False, scale=None, zero=zero)
        metrics = ForecastMetrics(baselines=baselines)
        metrics.update(torch.tensor([2.0, -1.0, 3.0]).view(1, 3, 1), {"x": x, "y": y})
        expected = {"mse": 2.0, "mae": 4 / 3, "mse_naive": 19 / 3, "mae_naive": 7 / 3}
        assert metrics.compute(Distributed()) == pytest.approx(expected)
        assert baselines.verdict == verdict


def test_only_cells_of_series_with_a_scale_count_for_mase():
    """By hand: errors 2, 4, -, of a series whose rows differ by 0.5; and four cells of one that is constant."""
    y = torch.tensor([[2.0, 5.0], [-4.0, 5.0], [np.nan, 5.0], [np.nan, 5.0]]).view(1, 4, 2)
    batch = {"x": torch.zeros(1, 2, 2), "y": y, "observed": (~y.isnan()).float()}
    metrics = ForecastMetrics(None, None, [0, 1], Baselines(1, False, torch.tensor([0.5, 0.0]).double()))
    metrics.update(torch.zeros(1, 4, 2), batch)
    assert metrics.compute(Distributed())["mase"] == pytest.approx((2.0 + 4.0) / 2 / 0.5)
    whole = ForecastMetrics(None, None, None, Baselines(1, False, torch.tensor([0.5, 0.0]).double()))
    whole.update(torch.zeros(1, 2, 2), {"x": torch.zeros(1, 2, 2), "y": y[:, :2]})
    assert whole.compute(Distributed())["mase"] == pytest.approx(6.0)
