"""Intervals around a predictable signal with noise of a known distribution: their coverage, width and scores."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exp.backends_registry import create_backend
from exp.engine.distributed import Distributed
from exp.errors import ConfigError
from exp.forecasting.intervals.adaptive import AdaptiveMetrics, adapted
from exp.forecasting.intervals.calibrate import Scores, calibrated_quantiles, calibrated_residuals
from exp.forecasting.intervals.conformal import OrderedScores, quantile_levels, windows_needed
from exp.forecasting.intervals.intervals import Intervals, Spread
from exp.forecasting.intervals.metrics import IntervalMetrics, gaussian_crps
from exp.models.base import Model

SIGMA = torch.tensor([[0.5, 2.0], [1.0, 4.0], [2.0, 8.0]])  # by step and channel
Z80, Z95 = 1.2816, 1.9600
LEVELS = [0.8, 0.95]
QUANTILES = [0.025, 0.1, 0.5, 0.9, 0.975]


class Windows:
    """Windows whose truth is the signal in ``x``, and noise."""

    def __init__(self, count, noise, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 3, 2, generator=generator) * 10
        self.y = self.x + noise(generator, (count, 3, 2))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


class Signal(Model):
    """Knows the signal, and says of its noise what it is told to."""

    def __init__(self, spread=None, factor=1.0):
        super().__init__()
        self.spread, self.factor, self.quantiles = spread, factor, QUANTILES

    def forward(self, x, y=None, mode="tensor"):
        if mode != "spread":
            return x
        said = (SIGMA * self.factor).expand_as(x)
        z = torch.tensor([-Z95, -Z80, 0.0, Z80, Z95])
        return said if self.spread == "std" else x.unsqueeze(-1) + said.unsqueeze(-1) * z


def gaussian(generator, shape):
    return torch.randn(shape, generator=generator) * SIGMA


def skewed(generator, shape):
    return torch.empty(shape).exponential_(generator=generator) * SIGMA


def session():
    return SimpleNamespace(
        backend=create_backend({"_target_": "cpu", "name": "cpu"}),
        config=SimpleNamespace(precision="fp32"),
        device=torch.device("cpu"),
        distributed=Distributed(),
    )


def scores(noise, spread=None, factor=1.0, count=1000, budget=2**20):
    model, here = Signal(spread, factor), session()
    data = SimpleNamespace(eval_batch_size=64, names=["a", "b"], scored=[0, 1])
    return Scores(here, data, Windows(count, noise), model, budget, spread and Spread(here, model))


def measured(intervals, noise):
    """The figures, and the tables of channels and steps."""
    metrics = IntervalMetrics(intervals, ["a", "b"], torch.zeros(2).double(), torch.ones(2).double())
    test = Windows(4000, noise, seed=1)
    for index in torch.arange(4000).split(256):
        metrics.update(test.x[index], test[index])
    return metrics.compute(Distributed()), metrics.tables()


def covers(found):
    return all(abs(found[f"coverage_{100 * level:g}"] - level) < 0.03 for level in LEVELS)


@pytest.mark.parametrize(("noise", "signed"), [(gaussian, False), (gaussian, True), (skewed, True), (skewed, False)])
def test_residuals_cover_noise_of_any_distribution(noise, signed):
    found = calibrated_residuals(scores(noise), LEVELS, signed=signed)
    intervals = Intervals("residuals", LEVELS, found.taus, torch.from_numpy(found.offsets))
    figures, (channels, steps) = measured(intervals, noise)
    assert covers(figures), figures
    for table in (channels, steps):
        assert all(abs(value - 0.8) < 0.03 for value in table.columns["coverage_80"])
    if noise is skewed:  # from 0 to -log(0.05), and to either side; or from -log(0.975) to -log(0.025)
        assert figures["width_95"] == pytest.approx(float(SIGMA.mean()) * (3.66 if signed else 2 * 3.0), rel=0.1)
    else:
        for factor in (1.5, 1 / 1.5):  # a forecast that is worse or better than in validation is found out
            assert not covers(measured(intervals, lambda *how, f=factor: f * noise(*how))[0])
        assert channels.columns["width_95"] == pytest.approx((2 * Z95 * SIGMA.mean(0)).tolist(), rel=0.1)
        assert figures["crps"] == pytest.approx(float(SIGMA.mean()) / math.sqrt(math.pi), rel=0.03)


@pytest.mark.parametrize("kind", ["std", "quantiles"])
@pytest.mark.parametrize("factor", [1.0, 0.5, 3.0])
def test_what_a_model_says_is_measured_and_mended(kind, factor):
    given = scores(gaussian, kind, factor)
    plain, mended = torch.zeros(5, 1, 1), calibrated_quantiles if kind == "quantiles" else calibrated_residuals
    if kind == "std":
        plain = torch.tensor([-Z95, -Z80, 0, Z80, Z95]).view(-1, 1, 1)
    found, _ = measured(Intervals(kind, LEVELS, QUANTILES, plain, given.spread, calibrated=False), gaussian)
    # A model that is wrong by construction fails, and only that.
    assert covers(found) == (factor == 1.0), found
    made = mended(given, LEVELS)
    found, _ = measured(Intervals(kind, LEVELS, made.taus, torch.from_numpy(made.offsets), given.spread), gaussian)
    assert covers(found), found


def test_ranks_are_those_of_the_definition_where_truth_is_missing_too():
    values = np.random.default_rng(0).normal(size=(40, 2, 3)).astype(np.float32)
    values[:7, 1, 2] = np.nan
    ordered = OrderedScores(values.copy(), ["a", "b", "c"], [0, 1, 2])
    assert ordered.fewest == 33
    for level in (0.5, 0.95):
        for place in np.ndindex(2, 3):
            known = sorted(value for value in values[(slice(None), *place)] if value == value)
            rank = math.ceil((len(known) + 1) * level - 1e-9)
            assert ordered.bound(level)[place] == known[rank - 1]
            assert ordered.lower_bound(level)[place] == known[-rank]


def test_a_series_that_is_forecast_needs_truth_and_others_do_not():
    values = np.random.default_rng(0).normal(size=(40, 2, 3)).astype(np.float32)
    values[:, :, 0] = np.nan
    values[6:, 1, 2] = np.nan
    assert (OrderedScores(values.copy(), ["a", "b", "c"], [1]).bound(0.9)[:, 0] == 0).all()
    for scored, named in (([1, 2], "6 of 40 .* c at step 2 .* 9 "), ([0, 1], "0 of 40 .* a at step 1 ")):
        with pytest.raises(ConfigError, match=named):
            OrderedScores(values.copy(), ["a", "b", "c"], scored).bound(0.9)


def test_too_few_windows_say_how_many_would_do():
    assert [windows_needed(level) for level in (0.5, 0.8, 0.99)] == [1, 4, 99]
    calibrated_residuals(scores(gaussian, count=19), LEVELS)
    with pytest.raises(ConfigError, match=r"18 .* 19 "):
        calibrated_residuals(scores(gaussian, count=18), LEVELS)


def test_within_a_budget_windows_are_spread_evenly():
    given = scores(gaussian, count=1000, budget=4 * 6 * 30)
    found = calibrated_residuals(given, LEVELS)
    assert (found.windows, found.of) == (30, 1000)
    error = (given.val.y - given.val.x).abs()[torch.arange(30) * 1000 // 30]
    place = [round(tau, 6) for tau in found.taus].index(0.9)
    assert np.allclose(found.offsets[place], error.sort(dim=0).values[24])


@pytest.mark.parametrize("kind", ["residuals", "std"])
def test_scores_are_those_of_their_formulas(kind):
    """Against sums in float64, and a CRPS by definition; at any batch size."""
    levels = [0.2, 0.6]
    taus = quantile_levels(levels)
    offsets = torch.tensor([-1.5, -0.4, 0.1, 0.7, 1.0]).view(-1, 1, 1)
    spread = None if kind == "residuals" else Spread(session(), Signal("std"))
    intervals = Intervals(kind, levels, taus, offsets, spread)
    mean, std = torch.tensor([3.0, -500.0]).double(), torch.tensor([0.1, 20.0]).double()
    test = Windows(50, gaussian)
    test.y[3, 1, 1] = math.nan
    y, x = test.y.double(), test.x.double()
    known = y == y
    scale = 1.0 if kind == "residuals" else SIGMA.double()
    errors = [y - (x + float(offset) * scale) for offset in offsets]
    losses = [torch.maximum(tau * error, (tau - 1) * error) for tau, error in zip(taus, errors)]
    total = sum((loss * std)[known].sum() for loss in losses)
    weights = [(b - a) / 2 for a, b in zip([0, *taus], [*taus[1:], 1])]
    expected = {
        "wql": 2 * total / 5 / (y * std + mean)[known].abs().sum(),
        "crps": sum(2 * weight * loss[known].mean() for weight, loss in zip(weights, losses)),
        "coverage_60": ((y >= x - 1.5 * scale) & (y <= x + 1.0 * scale))[known].double().mean(),
        "width_60_file_units": (2.5 * std * scale * torch.ones_like(y))[known].mean(),
    }
    for size in (50, 7):
        metrics = IntervalMetrics(intervals, None, mean, std)
        for index in torch.arange(50).split(size):
            metrics.update(test.x[index], test[index])
        found = metrics.compute(Distributed())
        for name, value in expected.items():
            assert found[name] == pytest.approx(float(value), rel=1e-5), name


def test_the_score_of_a_gaussian_in_closed_form():
    error, std = torch.tensor([0.0, 1.3, -4.0]).double(), torch.tensor([1.0, 0.5, 2.0]).double()
    grid = torch.linspace(-40, 40, 400001).double()
    for one, found, width in zip(error, gaussian_crps(error, std), std):
        below = 0.5 * (1 + torch.erf(grid / width / math.sqrt(2)))
        assert float(found) == pytest.approx(float(((below - (grid >= one).double()) ** 2).sum() * 2e-4), rel=1e-3)
    # Without a width: the absolute error.
    assert gaussian_crps(error, torch.zeros(3)).tolist() == pytest.approx([0.0, 1.3, 4.0], abs=1e-5)


def test_a_negative_correction_crosses_no_quantiles_and_all_figures_are_of_the_same_ones():
    offsets = torch.tensor([0.2, 1.0, 0.0, -1.0, -0.2]).view(-1, 1, 1)
    intervals = Intervals("quantiles", LEVELS, QUANTILES, offsets, lambda _: said)
    forecast = torch.zeros(1, 1, 1)
    said = torch.tensor([-0.6, -0.5, 0.0, 0.5, 0.6]).view(1, 1, 1, 5)
    quantiles = dict(intervals.quantiles(forecast, said))
    assert [round(float(quantiles[number]), 6) for number in range(5)] == [-0.4, 0.0, 0.0, 0.0, 0.4]
    metrics = IntervalMetrics(intervals, None, torch.zeros(1).double(), torch.ones(1).double())
    metrics.update(forecast, {"y": forecast})
    found = metrics.compute(Distributed())
    assert (found["coverage_80"], found["width_80"]) == (1.0, 0.0)
    # Only the outer two miss a truth of 0, by 0.4 each, at levels 0.025 and 0.975 and with weights of 0.05 each.
    assert found["crps"] == pytest.approx(2 * 2 * 0.05 * 0.025 * 0.4, rel=1e-5)


def by_definition(scores, first, level, rate):
    """One step after the other, without anything that is not known yet."""
    windows, horizon = scores.shape
    inside = np.full((windows, horizon), np.nan)
    for step in range(horizon):
        half, misses = [float(first[step])], {}
        for window in range(windows):
            if window - step - 1 >= 0:  # the truth of this step of that window is the last row that is known
                missed = misses[window - step - 1]
                half.append(max(half[-1] + rate * float(first[step]) * (missed - (1 - level)), 0.0))
            misses[window] = scores[window, step] > half[-1]
            inside[window, step] = not misses[window]
    return inside.sum(axis=0)


def test_adapted_intervals_use_only_what_is_known():
    scores = np.abs(np.random.default_rng(0).normal(size=(200, 5))).astype(np.float32)
    first = np.linspace(0.2, 2.0, 5).astype(np.float32)
    inside, _ = adapted(scores[..., None], first[:, None], 0.8, 0.05)
    assert inside[:, 0].tolist() == by_definition(scores, first, 0.8, 0.05).tolist()


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_adapted_intervals_follow_a_drift(factor):
    """Calibrated on errors of another size than those of the test."""
    found = calibrated_residuals(scores(gaussian), LEVELS)
    intervals = Intervals("residuals", LEVELS, found.taus, torch.from_numpy(found.offsets), adapts=0.02)
    test = Windows(4000, lambda *how: factor * gaussian(*how), seed=1)
    results = []
    for size, budget in ((4000, 2**28), (300, 1)):
        metrics = AdaptiveMetrics(intervals, 0.02, budget)
        order = torch.randperm(4000, generator=torch.Generator().manual_seed(size))  # ranks have any share
        for index in order.split(size):
            metrics.update(test.x[index], {**test[index], "index": index})
        results.append(metrics.compute(Distributed()))
    assert results[0] == pytest.approx(results[1], rel=1e-9)
    for level in LEVELS:
        assert abs(results[0][f"coverage_{100 * level:g}_adaptive"] - level) < 0.03
