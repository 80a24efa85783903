from __future__ import annotations

import pytest
import torch

from exp.forecasting.timebridge.loss import TimeFrequencyLoss, dft_matrix


def with_fft(prediction, target, alpha):
    in_frequency = (torch.fft.rfft(prediction, dim=1) - torch.fft.rfft(target, dim=1)).abs().mean()
    return (1 - alpha) * (prediction - target).abs().mean() + alpha * in_frequency


@pytest.mark.parametrize(("horizon", "alpha"), [(7, 1.0), (96, 0.0), (720, 0.35)])
def test_value_and_gradient_equal_those_of_the_fft(horizon, alpha):
    torch.manual_seed(0)
    prediction, target = torch.randn(4, horizon, 3, requires_grad=True), torch.randn(4, horizon, 3)
    loss, expected = TimeFrequencyLoss(horizon, alpha)(prediction, target), with_fft(prediction, target, alpha)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(each, prediction)[0] for each in (loss, expected))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5 / horizon)


def test_gradient_is_zero_where_there_is_no_difference():
    prediction = torch.randn(2, 24, 3, requires_grad=True)
    loss = TimeFrequencyLoss(24, 0.35)(prediction, prediction.detach().clone())
    loss.backward()
    assert loss.item() < 1e-12
    assert torch.equal(prediction.grad, torch.zeros_like(prediction))


def test_the_matrix_is_accurate_at_long_horizons():
    x = torch.randn(8, 2048, dtype=torch.float64)
    spectrum = torch.fft.rfft(x)
    expected = torch.cat([spectrum.real, spectrum.imag], 1)
    torch.testing.assert_close(x @ dft_matrix(2048).double(), expected, rtol=1e-5, atol=1e-5)


def test_half_precision_is_computed_in_float32():
    torch.manual_seed(0)
    prediction, target = torch.randn(2, 96, 3).bfloat16(), torch.randn(2, 96, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = TimeFrequencyLoss(96, 0.35)(prediction, target)
    assert torch.equal(loss, TimeFrequencyLoss(96, 0.35)(prediction.float(), target))
