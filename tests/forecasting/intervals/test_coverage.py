"""Intervals around a predictable signal with noise of a known distribution: their coverage, width and scores."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exp.distributed import Distributed
from exp.errors import ConfigError
from exp.forecasting.calibration import (
    ConformityScores,
    build_intervals,
    calibrate,
    check_num_scores,
    conformal_bound,
)
from exp.forecasting.interval_metrics import IntervalMetrics
from exp.forecasting.intervals import SCORED_LEVELS, Intervals, quantile_levels
from exp.forecasting.metrics import Bounds
from exp.forecasting.model import Forecaster
from exp.forecasting.outputs import Normal, Points, PosteriorDeviations, Quantiles, RawForecast
from exp.hardware.registry import create_backend

SIGMA = torch.tensor([[0.5, 2.0], [1.0, 4.0], [2.0, 8.0]])  # by step and channel
Z80, Z95 = 1.2816, 1.9600
LEVELS, QUANTILES = [0.8, 0.95], [0.025, 0.1, 0.5, 0.9, 0.975]
TAUS = quantile_levels([*LEVELS, *SCORED_LEVELS])
ONE, ZERO = torch.ones(2).double(), torch.zeros(2).double()


class Windows:
    """Windows whose truth is the signal in ``x``, and noise."""

    def __init__(self, count, noise, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 3, 2, generator=generator) * 10
        self.y = self.x + noise(generator, (count, 3, 2))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index], "index": index}


class Signal(Forecaster):
    """Knows the signal, and says of its noise that it is ``factor`` times as large as it is."""

    def __init__(self, output, factor=1.0):
        super().__init__(3, 3, output)
        self.factor, self.gives_values = factor, not isinstance(output, Points)

    def raw_forecast(self, x):
        said = SIGMA.expand_as(x) * self.factor
        if isinstance(self.output, Quantiles):
            return RawForecast(x, said.unsqueeze(-1) * torch.tensor([-Z95, -Z80, Z80, Z95]), torch.ones(1))
        return RawForecast(x, said.unsqueeze(-1), torch.ones(1))


def gaussian(generator, shape):
    return torch.randn(shape, generator=generator) * SIGMA


def skewed(generator, shape):
    return torch.empty(shape).exponential_(generator=generator) * SIGMA


def scores(noise, output, factor=1.0, count=1000):
    session = SimpleNamespace(
        backend=create_backend({"_target_": "cpu", "name": "cpu"}),
        config=SimpleNamespace(precision="fp32"),
        device=torch.device("cpu"),
        distributed=Distributed(),
    )
    data = SimpleNamespace(eval_batch_size=64, names=["a", "b"], scored=[0, 1])
    return ConformityScores(session, data, Windows(count, noise), Signal(output, factor), output)


def filled(metrics, model, windows, order, size):
    for index in order.split(size):
        metrics.update(model(**windows[index], mode="predict"), windows[index])
    return metrics.compute(Distributed())


@pytest.mark.parametrize(
    ("output", "noise", "width"),
    [
        (Points(), skewed, 2 * 3.0),
        (PosteriorDeviations(), gaussian, 2 * Z95),
        (Quantiles(QUANTILES), gaussian, 2 * Z95),
    ],
)
def test_calibrated_intervals_cover_at_every_step_and_channel(output, noise, width):
    """Noise of any distribution; also where the model says half of the deviation that there is."""
    given = scores(noise, output, factor=0.5)
    taus = output.levels or TAUS
    offsets, _ = calibrate(given, LEVELS, taus)
    metrics = IntervalMetrics(Intervals(output, LEVELS, taus, offsets), ["a", "b"], ZERO, ONE)
    figures = filled(metrics, given.model, Windows(4000, noise, seed=1), torch.arange(4000), 256)
    assert [figures["coverage_80"], figures["coverage_95"]] == pytest.approx(LEVELS, abs=0.03)
    assert figures["width_95"] == pytest.approx(width * float(SIGMA.mean()), rel=0.1)
    by_place = [value for table in metrics.tables() for value in table.columns["coverage_80"]]
    assert by_place == pytest.approx([0.8] * 5, abs=0.03)


def residuals(empty):
    """Of 40 windows, 2 steps and 3 series, in order; some have no truth."""
    values = np.random.default_rng(0).normal(size=(40, 2, 3)).astype(np.float32)
    values[empty] = np.nan
    return np.sort(values, axis=0)


def test_a_series_that_is_forecast_needs_windows_with_truth_and_others_do_not():
    check_num_scores(residuals(np.s_[:, :, 0]), 0.9, "abc", [1, 2])
    assert (conformal_bound(residuals(np.s_[:, :, 0]), 0.9)[:, 0] == 0).all()
    for empty, named in (
        (np.s_[6:, 1, 2], "6 of 40 .* c at step 2, and 9 "),
        (np.s_[:, :, 0], "0 of 40 .* a at step 1"),
    ):
        with pytest.raises(ConfigError, match=named):
            check_num_scores(residuals(empty), 0.9, "abc", [0, 1, 2])
    calibrate(scores(gaussian, Points(), count=19), LEVELS, TAUS)
    with pytest.raises(ConfigError, match=r"18 .* 19 "):
        calibrate(scores(gaussian, Points(), count=18), LEVELS, TAUS)


@pytest.mark.parametrize("output", [Points(), PosteriorDeviations()])
def test_scores_are_those_of_their_formulas(output):
    """Against sums in float64, and a CRPS by definition; at any batch size, and within bounds."""
    levels = [0.2, 0.6]
    taus = quantile_levels(levels)
    offsets = torch.tensor([-1.5, -0.4, 0.0, 0.4, 1.5]).view(-1, 1, 1)
    given = scores(gaussian, output, count=50)
    mean, std, scale = (torch.tensor(each).double() for each in ([3.0, -500.0], [0.1, 20.0], [0.5, 0.0]))
    lowest = torch.tensor([-4.0, -math.inf]).double()
    given.val.y[3, 1, 1] = math.nan
    y, x = given.val.y.double(), given.val.x.double()
    known = y == y
    z = torch.tensor([0.0] * 5 if isinstance(output, Points) else [-0.841621, -0.253347, 0.0, 0.253347, 0.841621])
    spread = 1.0 if isinstance(output, Points) else SIGMA.double()
    quantiles = [torch.maximum(x + float(offset + own) * spread, lowest) for offset, own in zip(offsets, z)]
    losses = [torch.maximum(tau * (y - q), (tau - 1) * (y - q)) for tau, q in zip(taus, quantiles)]
    total = sum((loss * std)[known].sum() for loss in losses)
    weights = [(b - a) / 2 for a, b in zip([0, *taus], [*taus[1:], 1])]
    low, high = quantiles[0], quantiles[4]
    outside = (low - y).clamp_min(0) + (y - high).clamp_min(0)
    expected = {
        "wql": 2 * total / 5 / (y * std + mean)[known].abs().sum(),
        "crps": sum(2 * weight * loss[known].mean() for weight, loss in zip(weights, losses)),
        "coverage_60": ((y >= low) & (y <= high))[known].double().mean(),
        "width_60_file_units": ((high - low) * std)[known].mean(),
        "sql": (2 * sum(losses) / 5)[..., 0].mean() / 0.5,  # the second series has no scale
        "msis_60": ((high - low) + 2 / 0.4 * outside)[..., 0].mean() / 0.5,
    }
    for size in (50, 7):
        intervals = Intervals(output, levels, taus, offsets)
        metrics = IntervalMetrics(intervals, None, mean, std, scale=scale, bounds=Bounds(lowest))
        found = filled(metrics, given.model, given.val, torch.arange(50), size)
        for name, value in expected.items():
            assert found[name] == pytest.approx(float(value), rel=1e-5), name


def test_a_negative_correction_crosses_no_quantiles_and_all_figures_are_of_the_same_ones():
    offsets = torch.tensor([0.2, 1.0, 0.0, -1.0, -0.2]).view(-1, 1, 1)
    values = torch.tensor([0.0, -0.6, -0.5, 0.0, 0.5, 0.6]).view(1, 1, 1, 6)
    intervals = Intervals(Quantiles(QUANTILES), LEVELS, QUANTILES, offsets)
    quantiles = dict(intervals.quantiles(values))
    assert [round(float(quantiles[number]), 6) for number in range(5)] == [-0.4, 0.0, 0.0, 0.0, 0.4]
    metrics = IntervalMetrics(intervals, None, ZERO[:1], ONE[:1])
    metrics.update(values, {"y": torch.zeros(1, 1, 1)})
    found = metrics.compute(Distributed())
    assert (found["coverage_80"], found["width_80"]) == (1.0, 0.0)
    # Only the outer two miss a truth of 0, by 0.4 each, at levels 0.025 and 0.975 and with weights of 0.05 each.
    assert found["crps_own_levels"] == pytest.approx(2 * 2 * 0.05 * 0.025 * 0.4, rel=1e-5)
    assert not {"crps", "wql"} & {*found}  # those of 19 levels


def test_the_scores_of_a_gaussian_are_the_same_quantity_whatever_the_intervals_are_made_of():
    """A truth of 0 to a forecast of 0 with deviation 1: twice the mean of tau * |z(tau)|, by hand from a table of z."""
    # of 0.95, 0.90, ... 0.55
    z = [1.644854, 1.281552, 1.036433, 0.841621, 0.67449, 0.524401, 0.38532, 0.253347, 0.125661]
    mirrored = 2 * sum(0.05 * step * each for step, each in enumerate(z, 1))  # the pinball loss of both ends
    offsets = torch.tensor([-each for each in z] + [0.0] + z[::-1]).view(-1, 1, 1)
    for output, own, width in ((Points(), offsets, 1), (Normal(), None, 2)):
        intervals = Intervals(output, [0.8], quantile_levels(SCORED_LEVELS), own)
        metrics = IntervalMetrics(intervals, None, torch.full((1,), 5.0).double(), ONE[:1])
        metrics.update(torch.tensor([0.0, 1.0])[:width].expand(2, 1, 1, width), {"y": torch.zeros(2, 1, 1)})
        found = metrics.compute(Distributed())
        assert found["crps"] == pytest.approx(0.1 * mirrored, rel=1e-5)
        assert found["crps"] == pytest.approx(0.230576, abs=1e-6)  # the exact score is 0.233695
        assert found["wql"] == pytest.approx(2 * mirrored / 19 / 5.0, rel=1e-5)
        assert found["width_80"] == pytest.approx(2 * 1.281552, rel=1e-5)


def test_the_bound_is_the_score_of_rank_n_plus_one_times_the_level():
    """Of ten scores 1 to 10, by hand: ceil(11 * 0.8) = 9, ceil(11 * 0.9) = 10, ceil(11 * 0.5) = 6."""
    ordered = np.arange(1, 11, dtype=np.float32).reshape(10, 1, 1)
    assert [conformal_bound(ordered, level).item() for level in (0.5, 0.8, 0.9, 0.05)] == [6.0, 9.0, 10.0, 1.0]
    missing = np.concatenate([ordered[:7], np.full((3, 1, 1), np.nan, dtype=np.float32)])
    assert conformal_bound(missing, 0.8).item() == 7.0  # ceil(8 * 0.8)
    for level, needed in ((0.8, 4), (0.9, 9), (0.95, 19)):  # the fewest n with ceil((n + 1) * level) <= n
        check_num_scores(ordered[:1].repeat(needed, axis=0), level, "a", [0])
        with pytest.raises(ConfigError, match=f"{needed - 1} of {needed - 1} .* {needed} are needed"):
            check_num_scores(ordered[:1].repeat(needed - 1, axis=0), level, "a", [0])


def test_a_model_s_own_deviations_are_those_of_a_gaussian_unless_they_are_corrected():
    """Of a truth N(0, 2) around 10 with deviation 2: ends at 10 -+ 1.281552 * 2."""
    task = SimpleNamespace(intervals=[0.8], intervals_method="model", intervals_calibrate=False)
    task.get = lambda key: getattr(task, key)
    session = SimpleNamespace(config=SimpleNamespace(task=task), device=torch.device("cpu"))
    model = Signal(PosteriorDeviations())
    intervals = build_intervals(session, None, model)
    assert intervals.record == {"from": "PosteriorDeviations", "levels": [0.8]}
    quantiles = dict(intervals.quantiles(torch.tensor([10.0, 2.0]).view(1, 1, 1, 2)))
    (band,) = intervals.central(quantiles)
    assert [band.lower.item(), band.upper.item()] == pytest.approx([10 - 2.563103, 10 + 2.563103], rel=1e-6)
