"""Outputs of forecasters: densities, quantiles and samples against SciPy; a user's model with each of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from exp.errors import ConfigError
from exp.forecasting.counts import NegativeBinomial, Poisson
from exp.forecasting.model import Contract, Forecaster, ModuleForecaster
from exp.forecasting.outputs import Normal, Points, Quantiles, StudentT

TAUS = [0.025, 0.1, 0.3, 0.5, 0.7, 0.9, 0.975]
OUTPUTS = [Points, lambda: Quantiles([0.1, 0.5, 0.9]), Normal, StudentT, Poisson, NegativeBinomial]


def values_of(*numbers):
    """Values (1, N, 1, D) of N cells."""
    return torch.tensor([*zip(*numbers)], dtype=torch.float32).view(1, -1, 1, len(numbers))


def found_by(output, values, y):
    density = output.log_density(values, torch.tensor(y, dtype=torch.float32).view(1, -1, 1))
    return density.flatten().tolist(), torch.stack([*output.quantiles(values, TAUS)]).flatten(1).numpy()


@pytest.mark.parametrize("degrees", [2.01, 3.0, 4.7, 12.0, 300.0])
def test_gaussians_and_students_t_are_those_of_scipy(degrees):
    stats = pytest.importorskip("scipy.stats")
    y, location, scale = [-7.0, 0.3, 1.0, 20.0], [1.0, 0.0, 1.0, -2.0], [0.5, 2.0, 1e-3, 3.0]
    for output, law, more in (
        (Normal(), stats.norm(location, scale), ()),
        (StudentT(), stats.t(degrees, location, scale), ([degrees] * 4,)),
    ):
        density, quantiles = found_by(output, values_of(location, scale, *more), y)
        assert density == pytest.approx(law.logpdf(y), rel=1e-5, abs=1e-5)
        expected = np.stack([law.ppf(tau) for tau in TAUS])
        np.testing.assert_allclose((quantiles - location) / scale, (expected - location) / scale, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mean", [0.05, 3.0, 33.0, 1000.0, 1e6])
def test_counts_are_those_of_scipy(mean):
    stats = pytest.importorskip("scipy.stats")
    y = [0.0, 1.0, round(mean), round(2 * mean)]
    for size in (None, 0.3, 2.0, 50.0):
        law = stats.poisson(mean) if size is None else stats.nbinom(size, size / (size + mean))
        values = values_of([mean] * 4, *([] if size is None else [[size] * 4]))
        density, quantiles = found_by(Poisson() if size is None else NegativeBinomial(), values, y)
        assert density == pytest.approx(law.logpmf(y), rel=1e-5, abs=1e-5)
        expected = np.array([law.ppf(tau) for tau in TAUS])
        small = expected < 32
        assert quantiles[small, 0].tolist() == expected[small].tolist()
        assert abs(law.cdf(quantiles[:, 0]) - law.cdf(expected)).max() < 0.01


def test_samples_have_the_quantiles_of_their_output():
    generator = np.random.default_rng(0)
    for output, values in (
        (Quantiles([0.1, 0.5, 0.9]), values_of([2.0], [1.0], [2.0], [5.0])),
        (Normal(), values_of([2.0], [3.0])),
        (StudentT(), values_of([2.0], [3.0], [4.0])),
        (Poisson(), values_of([20.0])),
        (NegativeBinomial(), values_of([20.0], [2.0])),
    ):
        drawn = output.sample(values, 20_000, generator)
        assert drawn.shape == (20_000, 1, 1, 1)
        for tau, quantile in zip((0.1, 0.5, 0.9), output.quantiles(values, (0.1, 0.5, 0.9))):
            assert (drawn < quantile.item()).mean() - 0.01 < tau < (drawn <= quantile.item()).mean() + 0.01


class Linear(Forecaster):
    """The model of the docstring."""

    def __init__(self, lookback, horizon, channels, **keys):
        super().__init__(lookback, horizon, **keys)
        self.layer = nn.Linear(lookback, horizon)

    def forecast(self, x):
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class Plain(nn.Module):
    """Of somebody who does not know exp."""

    def __init__(self, lookback, horizon):
        super().__init__()
        self.layer = nn.Linear(lookback, horizon)

    def forward(self, x):
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("make", OUTPUTS)
@pytest.mark.parametrize("instance_norm", [False, True])
def test_any_model_learns_any_output_also_where_truth_is_missing(make, instance_norm):
    torch.manual_seed(0)
    x, y = (torch.poisson(torch.full((8, steps, 2), 5.0)) for steps in (12, 4))
    x[0] = 3.0  # a flat lookback
    keys = {"output": make(), "instance_norm": instance_norm}
    module = {"_target_": f"{Plain.__module__}.Plain"}
    for model in (Linear(12, 4, 2, **keys), ModuleForecaster(module, 12, 4, 2, **keys)):
        hidden, observed = y.clone(), torch.ones_like(y)
        hidden[1, 2, 0], observed[1, 2, 0] = math.nan, 0.0
        sum(model(x=x, y=hidden, observed=observed, mode="loss").values()).backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
        assert model(x=x, mode="predict").shape == y.shape
        points = model(x=x, mode="predict")
        model.gives_values = True
        values = model(x=x, mode="predict")
        assert values.shape == (*y.shape, model.output.num_values)
        assert torch.equal(values[..., 0], points)
        assert Contract.of(model).inputs == {"x": True, "observed": False}
        optimizer, losses = torch.optim.Adam(model.parameters(), 0.02), []
        for _ in range(30):
            losses.append(sum(model(x=x, y=y, mode="loss").values()))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < losses[0]


def test_levels_must_ascend_around_the_median():
    for levels in ([0.1, 0.9], [0.5, 0.1], [0.5, 1.5], [0.5]):
        with pytest.raises(ConfigError, match="levels"):
            Quantiles(levels)
