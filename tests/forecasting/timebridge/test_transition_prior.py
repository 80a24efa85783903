from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from exp.forecasting.timebridge import density as measured
from exp.forecasting.timebridge.density import NEGATIVE_SLOPE, log_square
from exp.forecasting.timebridge.prior import LatentMLPs, StationaryPrior
from tests.forecasting.timebridge.conftest import log_density


def in_torchs_layers(mlps, shared, own):
    """The density of the MLP of each latent in torch's operations, with the same parameters."""

    def of_latent(latent):
        def network(inputs):
            for number, layer in enumerate(mlps.layers):
                inputs = F.leaky_relu(inputs, NEGATIVE_SLOPE) if number else inputs
                inputs = F.linear(inputs, layer.weight[latent], layer.bias[latent])
            return inputs

        return network

    return log_density([of_latent(latent) for latent in range(len(mlps.layers[0].weight))], shared, own)


@pytest.mark.parametrize(
    ("latents", "context", "hidden", "num_layers", "rows"),
    # The last two are worked through in several blocks.
    [(7, 21, 300, 1, 150), (60, 10, 3, 1, 20), (5, 3, 12, 4, 60), (300, 3, 6, 1, 200), (300, 3, 6, 2, 200)],
)  # fmt: skip
def test_densities_and_gradients_are_those_of_torchs_layers(monkeypatch, latents, context, hidden, num_layers, rows):
    torch.manual_seed(latents)
    mlps = LatentMLPs(latents, context, hidden, num_layers).double()
    shared, own = (torch.randn(rows, size).double().requires_grad_() for size in (context, latents))
    weights, found = torch.rand(rows).double(), []
    for form in (in_torchs_layers, LatentMLPs.log_density, LatentMLPs.log_density):
        density = form(mlps, shared, own)
        found.append([density, *torch.autograd.grad(density, [shared, own, *mlps.parameters()], weights)])
        if len(found) == 2:
            monkeypatch.setattr(measured, "_takes_shallow_blocks", lambda *_: False)  # as on cards
    for density_and_gradients in found[1:]:
        torch.testing.assert_close(density_and_gradients, found[0], rtol=1e-9, atol=1e-9)


def test_a_derivative_of_zero_has_a_finite_log_and_gradient():
    derivative = torch.tensor([0.0, 1e-8, -1e-3, 0.1, -2.0], requires_grad=True)
    logs = log_square(derivative) / 2
    expected = [math.log(1e-3) - 0.5] * 2 + [math.log(size) for size in (1e-3, 0.1, 2.0)]
    assert logs.tolist() == pytest.approx(expected, abs=1e-6)
    (gradient,) = torch.autograd.grad(logs.sum(), derivative)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.01, -1e3, 10.0, -0.5]))
    prior = StationaryPrior(3, hidden=4)
    nn.init.zeros_(prior.mlps.layers[1].weight)
    density = prior(torch.randn(2, 5, 3))
    gradients = torch.autograd.grad(density.sum(), [*prior.parameters()])
    assert all(torch.isfinite(tensor).all() for tensor in (density, *gradients))
