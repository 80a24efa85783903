from __future__ import annotations

import itertools

import pytest
import torch

from exp.forecasting.timebridge.hmm import LOG_FLOOR, log_likelihood, viterbi

INF = float("inf")


def random_model(batch, steps, regimes, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    emissions = torch.randn(batch, steps, regimes, generator=generator) * scale - 3.0
    initial = torch.log_softmax(torch.randn(regimes, generator=generator), 0)
    transition = torch.log_softmax(torch.randn(regimes, regimes, generator=generator), 1)
    return emissions, initial, transition


def plain_log_likelihood(emissions, initial, transition):
    """The textbook's recursion, in float64, differentiated by autograd."""
    message = initial.double() + emissions[:, 0].double()
    for t in range(1, emissions.shape[1]):
        message = emissions[:, t] + torch.logsumexp(message.unsqueeze(2) + transition, 1)
    return torch.logsumexp(message, 1)


def assert_close(actual, expected, relative=1e-5):
    """To ``relative`` of each element or of the largest one, whichever is more."""
    assert actual.dtype == torch.float32
    largest = expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected.double(), rtol=relative, atol=relative * largest + 1e-30)


def assert_as_plain(model, relative=1e-5):
    """Likelihood and gradients are the plain recursion's; each sequence counts with a weight of its own."""
    weights = torch.linspace(0.5, 2.0, len(model[0]))
    ours, plain = ([tensor.to(dtype).requires_grad_() for tensor in model] for dtype in (torch.float32, torch.float64))
    actual, expected = log_likelihood(*ours), plain_log_likelihood(*plain)
    assert_close(actual, expected)
    found = torch.autograd.grad((actual * weights).sum(), ours)
    gradients = torch.autograd.grad((expected * weights).sum(), plain)
    for mine, theirs in zip(found, gradients):
        assert_close(mine, theirs, relative)


@pytest.mark.parametrize(
    ("batch", "steps", "regimes", "scale", "offset"),
    [(3, 2, 4, 2, 0), (2, 4, 1, 2, 0), (5, 37, 5, 2, 0), (1, 1440, 16, 2, 0), (1, 1440, 2, 30, -1e4)],
)
def test_likelihood_and_gradients_are_those_of_the_plain_recursion(batch, steps, regimes, scale, offset):
    emissions, initial, transition = random_model(batch, steps, regimes, scale)
    rows = torch.linspace(-1.0, 1.0, regimes).unsqueeze(1)  # of probabilities that do not add up to one
    for more in (0.0, rows):
        assert_as_plain((emissions + offset, initial, transition + more))


@pytest.mark.parametrize("size", [1e2, 1e12])
def test_observations_that_only_an_improbable_regime_explains(size):
    """Every step allows one regime: the path is known, and no way but the improbable transitions leads along it."""
    path = torch.randint(0, 3, (2, 200), generator=torch.Generator().manual_seed(1))
    emissions = torch.full((2, 200, 3), -size).scatter_(2, path.unsqueeze(2), -1.0)
    initial = torch.log_softmax(torch.tensor([0.0, -20.0, -40.0]), 0)
    transition = torch.log_softmax(torch.tensor([[0.0, -30.0, -60.0], [-40.0, 0.0, -35.0], [-25.0, -45.0, 0.0]]), 1)
    assert_as_plain((emissions, initial, transition), relative=1e-4)
    if size > 1e2:
        assert torch.equal(viterbi(emissions, initial, transition), path)


def test_what_is_impossible_is_very_improbable_and_its_gradients_are_finite():
    """-inf, as in the first sequence, and in a chain that only moves on."""
    emissions, initial, _ = random_model(2, 20, 3)
    emissions[0, 7] = -INF
    transition = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.9, 0.1], [0.0, 0.0, 1.0]]).log()
    model = [tensor.requires_grad_() for tensor in (emissions, initial, transition)]
    likelihood = log_likelihood(*model)
    assert likelihood[0].item() == pytest.approx(LOG_FLOOR, rel=1e-3)
    assert_close(likelihood[1:], plain_log_likelihood(emissions[1:], initial, transition))
    gradients = torch.autograd.grad(likelihood.sum(), model)
    assert all(torch.isfinite(tensor).all() for tensor in gradients)
    counts = torch.autograd.grad(log_likelihood(*model)[1], transition)[0]
    assert (counts[transition == -INF] == 0).all()
    assert counts.sum().item() == pytest.approx(19, rel=1e-4)
    assert set(viterbi(*model)[1].diff().tolist()) <= {0, 1}


@pytest.mark.parametrize(("steps", "regimes"), [(2, 3), (7, 2), (4, 4)])
def test_the_path_is_the_best_of_all_paths(steps, regimes):
    emissions, initial, transition = model = random_model(6, steps, regimes, scale=1.5, seed=steps)
    paths = torch.tensor(list(itertools.product(range(regimes), repeat=steps)))
    scores = emissions[:, torch.arange(steps), paths].double().sum(-1) + initial[paths[:, 0]]
    scores += transition[paths[:, :-1], paths[:, 1:]].double().sum(-1)
    assert torch.equal(viterbi(*model), paths[scores.argmax(1)])
