from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

from exp.forecasting.timebridge.density import gaussian_log_density, log_magnitude
from exp.forecasting.timebridge.tangent import plain_value_and_tangent
from exp.forecasting.timebridge.transition import ChangingPrior, LatentMLPs, StationaryPrior
from tests.forecasting.timebridge.conftest import log_density, values_and_slopes


def networks(mlps):
    """The MLP of each latent in torch's operations, with the same parameters."""

    def of_latent(latent):
        def network(inputs):
            for number, layer in enumerate(mlps.layers):
                inputs = F.leaky_relu(inputs, mlps.negative_slope) if number else inputs
                inputs = F.linear(inputs, layer.weight[latent], layer.bias[latent])
            return inputs

        return network

    return [of_latent(latent) for latent in range(len(mlps.layers[0].weight))]


def one_by_one(mlps, shared, own):
    return values_and_slopes(networks(mlps), shared, own)


def plain(mlps, shared, own):
    weights, biases = ([getattr(layer, name) for layer in mlps.layers] for name in ("weight", "bias"))
    return plain_value_and_tangent(shared, own, weights, biases, mlps.negative_slope)


def with_gradients(outputs, inputs, weights):
    weights = [weight.to(output) for weight, output in zip(weights, outputs)]
    return [*outputs, *torch.autograd.grad(outputs, inputs, weights)]


@pytest.mark.parametrize(
    ("latents", "context", "hidden", "num_layers", "rows", "slope"),
    # The last two are worked through in several blocks.
    [(1, 1, 64, 1, 200, 0.2), (60, 10, 3, 1, 20, 0.0), (5, 3, 12, 4, 60, 0.01), (300, 3, 6, 1, 200, 0.2),
     (300, 3, 6, 2, 200, 1.0)],
)  # fmt: skip
def test_values_derivatives_and_gradients_are_those_of_torchs_layers(latents, context, hidden, num_layers, rows, slope):
    """In float32, by the forms of CPU and cards, against float64."""
    torch.manual_seed(latents)
    mlps = LatentMLPs(latents, context, hidden, num_layers, slope)
    exact = copy.deepcopy(mlps).double()
    shared, own, weights = torch.randn(rows, context), torch.randn(rows, latents), torch.randn(2, rows, latents)
    found = []
    for form in (mlps, plain, one_by_one):
        model = exact if form is one_by_one else mlps
        inputs = [tensor.to(model.layers[0].weight).detach().clone().requires_grad_() for tensor in (shared, own)]
        outputs = model(*inputs) if form is mlps else form(model, *inputs)
        found.append(with_gradients(outputs, [*inputs, *model.parameters()], weights))
    for fused, on_card, expected in zip(*found):
        for actual in (fused, on_card):
            tolerance = 1e-5 * expected.abs().max().item() + 1e-12
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize(
    ("latents", "lags", "hidden", "num_layers", "compressed"),
    [(100, 2, 5, 1, 5), (7, 3, 300, 1, None), (4, 1, 6, 2, 4)],
)
def test_the_stationary_prior_is_the_change_of_variables_on_the_lagged_latents(
    latents, lags, hidden, num_layers, compressed
):
    torch.manual_seed(3)
    prior = StationaryPrior(latents, lags, hidden=hidden, num_layers=num_layers, compressed=compressed).double()
    z = torch.randn(3, 50, latents).double().requires_grad_()
    weights = torch.rand(1, 3, 50).double()
    lagged = torch.cat([z[:, lag : lag - lags] for lag in range(lags)], dim=-1)
    later = log_density(networks(prior.mlps), prior.compress(lagged), z[:, lags:])
    expected = torch.cat([Normal(0.0, 1.0).log_prob(z[:, :lags]).sum(-1), later], dim=1)
    inputs = [z, *prior.parameters()]
    found = [with_gradients([density], inputs, weights) for density in (prior(z), expected)]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    noise, log_derivative = prior.residuals(z)
    torch.testing.assert_close(gaussian_log_density(noise) + log_derivative.sum(-1), later, rtol=1e-9, atol=1e-9)


def test_the_changing_prior_is_the_change_of_variables_on_the_regimes_embeddings():
    torch.manual_seed(2)
    prior = ChangingPrior(latents=3, embedding=2, hidden=8, num_layers=2).double()
    table, z = torch.randn(4, 2).double().requires_grad_(), torch.randn(2, 6, 3).double().requires_grad_()
    regimes, weights = torch.randint(0, 4, (2, 6)), torch.rand(1, 2, 6)
    densities = prior(z, table[regimes]), log_density(networks(prior.mlps), table[regimes], z)
    inputs = [table, z, *prior.parameters()]
    torch.testing.assert_close(*(with_gradients([density], inputs, weights) for density in densities))


def test_a_derivative_of_zero_has_a_finite_log_and_gradient():
    derivative = torch.tensor([0.0, 1e-8, -1e-3, 0.1, -2.0], requires_grad=True)
    logs = log_magnitude(derivative)
    expected = [math.log(1e-3) - 0.5] * 2 + [math.log(size) for size in (1e-3, 0.1, 2.0)]
    assert logs.tolist() == pytest.approx(expected, abs=1e-6)
    (gradient,) = torch.autograd.grad(logs.sum(), derivative)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.01, -1e3, 10.0, -0.5]))
    prior = StationaryPrior(3, hidden=4)
    nn.init.zeros_(prior.mlps.layers[1].weight)
    density = prior(torch.randn(2, 5, 3))
    gradients = torch.autograd.grad(density.sum(), [*prior.parameters()])
    assert all(torch.isfinite(tensor).all() for tensor in (density, *gradients))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_hidden_size(num_layers):
    def kept(latents, hidden):
        prior = StationaryPrior(latents, hidden=hidden, num_layers=num_layers, compressed=4)
        saved = []

        def pack(tensor):
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            prior(torch.randn(2, 100, latents, requires_grad=True))
        own = {parameter.data_ptr() for parameter in prior.parameters()}
        return sum({each.data_ptr(): each.numel() for each in saved if each.data_ptr() not in own}.values())

    assert kept(20, 8) == kept(20, 64)
    assert kept(80, 8) < 4.1 * kept(20, 8)


def test_what_cannot_be_is_refused():
    for wrong in (
        lambda: ChangingPrior(3, 2, hidden=0),
        lambda: StationaryPrior(3, lags=0),
        lambda: StationaryPrior(3, negative_slope=-0.1),
        lambda: StationaryPrior(4, lags=3)(torch.randn(2, 3, 4)),
        lambda: ChangingPrior(5, 2)(torch.randn(2, 3, 5), torch.randn(2, 4, 2)),
    ):
        with pytest.raises(ValueError):
            wrong()
