"""Intervals around a predictable signal with noise of a known distribution: their coverage, width and scores."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exp.distributed import Distributed
from exp.errors import ConfigError
from exp.forecasting.intervals import (
    SCORED_LEVELS,
    ConformityScores,
    IntervalMetrics,
    Intervals,
    build_intervals,
    calibrate,
    check_num_scores,
    conformal_bound,
    predictive_distribution,
    quantile_levels,
)
from exp.hardware.registry import create_backend
from exp.models.base import Model

SIGMA = torch.tensor([[0.5, 2.0], [1.0, 4.0], [2.0, 8.0]])  # by step and channel
Z80, Z95 = 1.2816, 1.9600
NORMAL = torch.tensor([-Z95, -Z80, 0.0, Z80, Z95])
LEVELS, QUANTILES = [0.8, 0.95], [0.025, 0.1, 0.5, 0.9, 0.975]
TAUS = quantile_levels([*LEVELS, *SCORED_LEVELS])


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


class Signal(Model):
    """Knows the signal, and says of its noise what it is told to."""

    def __init__(self, distribution=None, factor=1.0):
        super().__init__()
        self.distribution, self.factor, self.quantiles = distribution, factor, QUANTILES

    def forward(self, x, y=None, index=None, mode="tensor"):
        if mode != "distribution":
            return x
        said = (SIGMA * self.factor).expand_as(x)
        return said if self.distribution == "std" else x.unsqueeze(-1) + said.unsqueeze(-1) * NORMAL


def gaussian(generator, shape):
    return torch.randn(shape, generator=generator) * SIGMA


def skewed(generator, shape):
    return torch.empty(shape).exponential_(generator=generator) * SIGMA


def scores(noise, distribution=None, factor=1.0, count=1000):
    session = SimpleNamespace(
        backend=create_backend({"_target_": "cpu", "name": "cpu"}),
        config=SimpleNamespace(precision="fp32"),
        device=torch.device("cpu"),
        distributed=Distributed(),
    )
    model = Signal(distribution, factor)
    data = SimpleNamespace(eval_batch_size=64, names=["a", "b"], scored=[0, 1])
    return ConformityScores(
        session, data, Windows(count, noise), model, distribution and partial(predictive_distribution, session, model)
    )


def filled(metrics, windows, order, size):
    for index in order.split(size):
        metrics.update(windows.x[index], windows[index])
    return metrics.compute(Distributed())


@pytest.mark.parametrize(
    ("kind", "noise", "symmetric", "width"),
    # The skewed residuals from 0 to -log(0.05), and to either side; or from -log(0.975) to -log(0.025).
    [("residuals", skewed, False, 3.66), ("residuals", skewed, True, 2 * 3.0), ("std", gaussian, True, 2 * Z95),
     ("quantiles", gaussian, True, 2 * Z95)],
)  # fmt: skip
def test_calibrated_intervals_cover_at_every_step_and_channel(kind, noise, symmetric, width):
    """Noise of any distribution; also where the model says half of the deviation that there is."""
    given = scores(noise, None if kind == "residuals" else kind, factor=0.5)
    taus = QUANTILES if kind == "quantiles" else TAUS
    offsets, _ = calibrate(given, kind, LEVELS, taus, symmetric)
    intervals = Intervals(kind, LEVELS, taus, offsets, given.distribution)
    metrics = IntervalMetrics(intervals, ["a", "b"], torch.zeros(2).double(), torch.ones(2).double())
    figures = filled(metrics, Windows(4000, noise, seed=1), torch.arange(4000), 256)
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
    calibrate(scores(gaussian, count=19), "residuals", LEVELS, TAUS)
    with pytest.raises(ConfigError, match=r"18 .* 19 "):
        calibrate(scores(gaussian, count=18), "residuals", LEVELS, TAUS)


@pytest.mark.parametrize("kind", ["residuals", "std"])
def test_scores_are_those_of_their_formulas(kind):
    """Against sums in float64, and a CRPS by definition; at any batch size."""
    levels = [0.2, 0.6]
    taus = quantile_levels(levels)
    offsets = torch.tensor([-1.5, -0.4, 0.1, 0.7, 1.0]).view(-1, 1, 1)
    given = scores(gaussian, None if kind == "residuals" else "std", count=50)
    mean, std = torch.tensor([3.0, -500.0]).double(), torch.tensor([0.1, 20.0]).double()
    given.val.y[3, 1, 1] = math.nan
    y, x = given.val.y.double(), given.val.x.double()
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
        metrics = IntervalMetrics(Intervals(kind, levels, taus, offsets, given.distribution), None, mean, std)
        found = filled(metrics, given.val, torch.arange(50), size)
        for name, value in expected.items():
            assert found[name] == pytest.approx(float(value), rel=1e-5), name


def test_a_negative_correction_crosses_no_quantiles_and_all_figures_are_of_the_same_ones():
    offsets = torch.tensor([0.2, 1.0, 0.0, -1.0, -0.2]).view(-1, 1, 1)
    forecast, said = torch.zeros(1, 1, 1), torch.tensor([-0.6, -0.5, 0.0, 0.5, 0.6]).view(1, 1, 1, 5)
    intervals = Intervals("quantiles", LEVELS, QUANTILES, offsets, lambda _: said)
    quantiles = dict(intervals.quantiles(forecast, said))
    assert [round(float(quantiles[number]), 6) for number in range(5)] == [-0.4, 0.0, 0.0, 0.0, 0.4]
    metrics = IntervalMetrics(intervals, None, torch.zeros(1).double(), torch.ones(1).double())
    metrics.update(forecast, {"y": forecast})
    found = metrics.compute(Distributed())
    assert (found["coverage_80"], found["width_80"]) == (1.0, 0.0)
    # Only the outer two miss a truth of 0, by 0.4 each, at levels 0.025 and 0.975 and with weights of 0.05 each.
    assert found["crps_own_levels"] == pytest.approx(2 * 2 * 0.05 * 0.025 * 0.4, rel=1e-5)
    assert not {"crps", "wql"} & {*found}  # those of 19 levels


def test_the_scores_of_a_gaussian_are_the_same_quantity_whatever_the_intervals_are_made_of():
    """A truth of 0 to a forecast of 0 with deviation 1: twice the mean of tau * |z(tau)|, by hand from a table of z."""
    z = [
        1.644854,
        1.281552,
        1.036433,
        0.841621,
        0.67449,
        0.524401,
        0.38532,
        0.253347,
        0.125661,
    ]  # of 0.95, 0.90, ... 0.55
    mirrored = 2 * sum(0.05 * step * each for step, each in enumerate(z, 1))  # the pinball loss of both ends
    offsets = torch.tensor([-each for each in z] + [0.0] + z[::-1]).view(-1, 1, 1)
    for kind, distribution in (("residuals", None), ("std", lambda batch: torch.ones_like(batch["y"]))):
        intervals = Intervals(kind, [0.8], quantile_levels(SCORED_LEVELS), offsets, distribution)
        metrics = IntervalMetrics(intervals, None, torch.full((1,), 5.0).double(), torch.ones(1).double())
        metrics.update(torch.zeros(2, 1, 1), {"y": torch.zeros(2, 1, 1)})
        found = metrics.compute(Distributed())
        assert found["crps"] == pytest.approx(0.1 * mirrored, rel=1e-5)
        assert found["crps"] == pytest.approx(0.230576, abs=1e-6)  # the exact score is 0.233695
        assert found["wql"] == pytest.approx(2 * mirrored / 19 / 5.0, rel=1e-5)
        assert found["width_80"] == pytest.approx(2 * 1.281552, rel=1e-5)


def test_the_bound_is_the_score_of_rank_n_plus_one_times_the_level():
    """Of ten scores 1 to 10, by hand: ceil(11 * 0.8) = 9, ceil(11 * 0.9) = 10, ceil(11 * 0.5) = 6; mirrored below."""
    ordered = np.arange(1, 11, dtype=np.float32).reshape(10, 1, 1)
    assert [conformal_bound(ordered, level).item() for level in (0.5, 0.8, 0.9, 0.05)] == [6.0, 9.0, 10.0, 1.0]
    assert [conformal_bound(ordered, level, lower=True).item() for level in (0.5, 0.8, 0.9)] == [5.0, 2.0, 1.0]
    missing = np.concatenate([ordered[:7], np.full((3, 1, 1), np.nan, dtype=np.float32)])
    assert conformal_bound(missing, 0.8).item() == 7.0  # ceil(8 * 0.8)
    for level, needed in ((0.8, 4), (0.9, 9), (0.95, 19)):  # the fewest n with ceil((n + 1) * level) <= n
        check_num_scores(ordered[:1].repeat(needed, axis=0), level, "a", [0])
        with pytest.raises(ConfigError, match=f"{needed - 1} of {needed - 1} .* {needed} are needed"):
            check_num_scores(ordered[:1].repeat(needed - 1, axis=0), level, "a", [0])


def test_a_model_s_own_deviations_are_those_of_a_gaussian_unless_they_are_corrected():
    """Of a truth N(0, 2) around 10 with deviation 2: ends at 10 -+ 1.281552 * 2."""
    task = SimpleNamespace(
        intervals=[0.8], intervals_method="model", intervals_calibrate=False, intervals_symmetric=True
    )
    task.get = lambda key: getattr(task, key)
    session = SimpleNamespace(config=SimpleNamespace(task=task), device=torch.device("cpu"))
    intervals = build_intervals(session, None, Signal("std"))
    assert intervals.record == {"from": "std", "levels": [0.8]}
    quantiles = dict(intervals.quantiles(torch.full((1, 1, 1), 10.0), torch.full((1, 1, 1), 2.0)))
    (band,) = intervals.central(quantiles)
    assert [band.lower.item(), band.upper.item()] == pytest.approx([10 - 2.563103, 10 + 2.563103], rel=1e-6)
