from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from exp.forecasting.timebridge.density import DERIVATIVE_FLOOR, gaussian_log_density, log_magnitude
from exp.forecasting.timebridge.tangent import plain_value_and_tangent, value_and_tangent
from exp.forecasting.timebridge.transition import ChangingPrior, LatentMLPs, StationaryPrior


def as_sequential(mlps, latent):
    """One latent's MLP in torch's modules, in float64."""
    modules = []
    for layer in mlps.layers:
        linear = nn.Linear(layer.weight.shape[2], layer.weight.shape[1])
        linear.load_state_dict({"weight": layer.weight[latent].detach(), "bias": layer.bias[latent].detach()})
        modules += [linear, nn.LeakyReLU(mlps.negative_slope)]
    return nn.Sequential(*modules[:-1]).double()


def by_second_derivatives(mlp, inputs):
    """Value and derivative with respect to the last input; torch differentiates the derivative a second time."""
    inputs = inputs if inputs.requires_grad else inputs.requires_grad_()
    value = mlp(inputs)
    (jacobian,) = torch.autograd.grad(value.sum(), inputs, create_graph=True)
    return value[:, 0], jacobian[:, -1]


def assert_close(actual, expected, relative=1e-5):
    """To ``relative`` of the largest element."""
    assert actual.shape == expected.shape
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=relative, atol=relative * expected.abs().max().item() + 1e-12
    )


def guarded_log(derivative):
    """Log of the magnitude, and below the floor the parabola that continues it."""
    size = derivative.abs() / DERIVATIVE_FLOOR
    return math.log(DERIVATIVE_FLOOR) + torch.where(size > 1, size.log(), (size**2 - 1) / 2)


@pytest.mark.parametrize(
    ("latents", "context", "hidden", "num_layers", "rows", "slope"),
    [(1, 1, 64, 1, 200, 0.2), (60, 10, 3, 1, 20, 0.0), (7, 7, 16, 2, 50, 1.0), (5, 3, 12, 4, 60, 0.01)],
)
def test_values_derivatives_and_gradients_are_those_of_torchs_layers(latents, context, hidden, num_layers, rows, slope):
    """Latent by latent in float64."""
    torch.manual_seed(latents)
    mlps = LatentMLPs(latents, context, hidden, num_layers, slope)
    shared, own = torch.randn(rows, context, requires_grad=True), torch.randn(rows, latents, requires_grad=True)
    value_weight, derivative_weight = torch.randn(rows, latents), torch.randn(rows, latents)
    value, derivative = mlps(shared, own)
    ((value * value_weight).sum() + (derivative * derivative_weight).sum()).backward()
    shared64, own64 = (tensor.detach().double().requires_grad_() for tensor in (shared, own))
    for latent in range(latents):
        mlp = as_sequential(mlps, latent)
        expected = by_second_derivatives(mlp, torch.cat([shared64, own64[:, latent : latent + 1]], 1))
        assert_close(value[:, latent], expected[0])
        assert_close(derivative[:, latent], expected[1])
        (expected[0] * value_weight[:, latent] + expected[1] * derivative_weight[:, latent]).sum().backward()
        for layer, linear in zip(mlps.layers, mlp[::2]):
            assert_close(layer.weight.grad[latent], linear.weight.grad)
            assert_close(layer.bias.grad[latent], linear.bias.grad)
    assert_close(shared.grad, shared64.grad)
    assert_close(own.grad, own64.grad)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_forms_of_cpu_and_cards_give_the_same(num_layers):
    """With rows and latents enough for several blocks."""
    torch.manual_seed(0)
    sizes, latents, rows = [4, *[6] * num_layers, 1], 300, 200
    arguments = [torch.randn(rows, 3), torch.randn(rows, latents)]
    arguments += [torch.randn(latents, *shape) for inputs, outputs in zip(sizes, sizes[1:])
                  for shape in ((outputs, inputs), (outputs,))]  # fmt: skip
    arguments = [argument.double().requires_grad_() for argument in arguments]
    weights = torch.randn(2, rows, latents).double().unbind()
    found = []
    for form in (value_and_tangent, plain_value_and_tangent):
        outputs = form(*arguments[:2], arguments[2::2], arguments[3::2], 0.2)
        found.append([*outputs, *torch.autograd.grad(outputs, arguments, weights)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lags", [1, 3])
@pytest.mark.parametrize("compressed", [None, 4])
def test_the_stationary_prior_is_the_change_of_variables_on_the_lagged_latents(lags, compressed):
    torch.manual_seed(1)
    prior = StationaryPrior(latents=5, lags=lags, hidden=8, compressed=compressed)
    z = torch.randn(2, 12, 5)
    noise, log_derivative = prior.residuals(z)
    density = prior(z)
    normal = torch.distributions.Normal(torch.zeros(()).double(), 1.0)
    torch.testing.assert_close(density[:, :lags].double(), normal.log_prob(z[:, :lags].double()).sum(-1))
    mlps = [as_sequential(prior.mlps, latent) for latent in range(5)]
    for t in range(lags, 12):
        context = prior.compress(z[:, t - lags : t].reshape(2, -1)).detach().double()
        expected = torch.zeros(2).double()
        for latent, mlp in enumerate(mlps):
            inputs = torch.cat([context, z[:, t, latent : latent + 1].double()], 1)
            value, derivative = by_second_derivatives(mlp, inputs)
            assert_close(noise[:, t - lags, latent], value)
            assert_close(log_derivative[:, t - lags, latent], guarded_log(derivative))
            expected += normal.log_prob(value) + guarded_log(derivative)
        assert_close(density[:, t], expected)


def test_the_changing_prior_is_the_change_of_variables_on_the_regimes_embeddings():
    torch.manual_seed(2)
    prior = ChangingPrior(latents=3, embedding=2, hidden=8, num_layers=2)
    table = torch.randn(4, 2, requires_grad=True)
    z, regimes = torch.randn(2, 6, 3), torch.randint(0, 4, (2, 6))
    density = prior(z, table[regimes])
    normal = torch.distributions.Normal(torch.zeros(()).double(), 1.0)
    expected = torch.zeros(12).double()
    for latent in range(3):
        inputs = torch.cat([table[regimes].reshape(12, 2), z[:, :, latent].reshape(12, 1)], 1).double()
        value, derivative = by_second_derivatives(as_sequential(prior.mlps, latent), inputs)
        expected = expected + normal.log_prob(value) + guarded_log(derivative)
    assert_close(density.flatten(), expected)
    density.sum().backward()
    assert_close(table.grad, torch.autograd.grad(expected.sum(), table)[0], relative=1e-4)


@pytest.mark.parametrize(("latents", "hidden", "num_layers"), [(100, 5, 1), (7, 300, 1), (4, 6, 2)])
def test_the_density_and_its_gradients_are_those_of_residuals_and_log_derivatives(latents, hidden, num_layers):
    torch.manual_seed(3)
    prior = StationaryPrior(latents, lags=2, hidden=hidden, num_layers=num_layers, compressed=5).double()
    z = torch.randn(3, 50, latents).double().requires_grad_()
    weights = torch.rand(3, 48).double()

    def outcome(density):
        return [density, *torch.autograd.grad((density * weights).sum(), [z, *prior.parameters()])]

    noise, log_derivative = prior.residuals(z)
    expected = outcome(gaussian_log_density(noise) + log_derivative.sum(-1))
    torch.testing.assert_close(outcome(prior(z)[:, 2:]), expected, rtol=1e-9, atol=1e-9)


def test_a_monotone_transition_gives_a_density():
    """With one hidden unit the map from latent to noise is one to one: its density integrates to 1."""
    torch.manual_seed(0)
    prior = ChangingPrior(latents=1, embedding=1, hidden=1)
    with torch.no_grad():
        prior.mlps.layers[0].weight.fill_(1.5)
        prior.mlps.layers[1].weight.fill_(-0.8)
    grid = torch.linspace(-40, 40, 80001).view(1, -1, 1)
    density = prior(grid, torch.full_like(grid, 0.3)).exp()
    assert (density.double().sum() * 80 / 80000).item() == pytest.approx(1.0, abs=1e-3)


def test_a_derivative_of_zero_has_a_finite_log_and_gradient():
    derivative = torch.tensor([0.0, 1e-8, -1e-3, 0.1, -2.0], requires_grad=True)
    logs = log_magnitude(derivative)
    assert logs[0].item() == pytest.approx(math.log(DERIVATIVE_FLOOR) - 0.5)
    torch.testing.assert_close(logs[2:], derivative[2:].abs().log(), rtol=0, atol=1e-6)
    logs.sum().backward()
    torch.testing.assert_close(derivative.grad, torch.tensor([0.0, 0.01, -1e3, 10.0, -0.5]))
    prior = StationaryPrior(3, hidden=4)
    nn.init.zeros_(prior.mlps.layers[1].weight)
    density = prior(torch.randn(2, 5, 3))
    density.sum().backward()
    assert torch.isfinite(density).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in prior.parameters())


@pytest.mark.parametrize("num_layers", [1, 2])
def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_hidden_size(num_layers):
    def kept(latents, hidden):
        prior = StationaryPrior(latents, hidden=hidden, num_layers=num_layers, compressed=4)
        own = {parameter.data_ptr() for parameter in prior.parameters()}
        sizes = {}

        def pack(tensor):
            if tensor.data_ptr() not in own:
                sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            prior(torch.randn(2, 100, latents, requires_grad=True))
        return sum(sizes.values())

    assert kept(20, 8) == kept(20, 64)
    assert kept(80, 8) < 4.1 * kept(20, 8)


def test_what_cannot_be_is_refused():
    for wrong in (
        lambda: ChangingPrior(3, 2, hidden=0),
        lambda: StationaryPrior(3, lags=0),
        lambda: StationaryPrior(3, negative_slope=-0.1),
        lambda: StationaryPrior(4, lags=3)(torch.randn(2, 3, 4)),
        lambda: ChangingPrior(5, 2)(torch.randn(2, 3, 4), torch.randn(2, 3, 2)),
        lambda: ChangingPrior(5, 2)(torch.randn(2, 3, 5), torch.randn(2, 4, 2)),
    ):
        with pytest.raises(ValueError):
            wrong()
