"""TimeBridge against a plain reference, and its loss, dropout and quantile heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference_timebridge import PlainTimeBridge, plain_loss

from exp.errors import ConfigError
from exp.forecasting.outputs import Quantiles
from exp.forecasting.timebridge.layers import dropout
from exp.forecasting.timebridge.loss import TimeFrequencyLoss
from exp.forecasting.timebridge.model import TimeBridge

SMALL = {"channels": 3, "lookback": 48, "horizon": 12, "period": 6, "d_model": 16, "d_ff": 24, "num_heads": 4}


def settings(layers, **more):
    names = ("integrated_layers", "downsampling_layers", "cointegrated_layers")
    return {**SMALL, **dict(zip(names, layers)), **more}


@pytest.fixture
def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(5, 48, 3).cumsum(1), "marks": torch.rand(5, 48, 4) - 0.5, "y": torch.randn(5, 12, 3)}


@pytest.mark.parametrize("layers", [(3, 1, 0), (1, 1, 1), (1, 1, 2), (1, 2, 1), (0, 0, 1)])
@pytest.mark.parametrize("patches_out", [None, 3])
def test_forecast_loss_and_gradients_equal_those_of_the_plain_reference(batch, layers, patches_out):
    options = settings(layers, num_patches_out=patches_out if layers[1] else None)
    torch.manual_seed(0)
    ours, plain = TimeBridge(**options).eval(), PlainTimeBridge(**options).eval()
    prefix = "module." if patches_out is None else "teacher.encoder."  # any path before the authors' names is found
    official = {f"{prefix}{key}": value for key, value in plain.state_dict().items()}
    ours.load_state_dict(ours.adapt_state_dict(official, Path("official.pth")), strict=True)
    forecast, expected = ours(batch["x"], batch["marks"]), plain(batch["x"], batch["marks"])
    losses = ours(**batch, mode="loss")["loss"], plain_loss(expected, batch["y"], 0.35)
    torch.testing.assert_close([forecast, losses[0]], [expected, losses[1]], rtol=1e-5, atol=1e-5)
    names = [name for name, _ in plain.named_parameters() if "norm0" not in name]
    gradients = (torch.autograd.grad(loss, [model.get_parameter(name) for name in names])
                 for loss, model in zip(losses, (ours, plain)))  # fmt: skip
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_quantile_heads_have_the_pinball_loss_and_do_not_cross(batch):
    model = TimeBridge(**settings((1, 1, 0), output=Quantiles([0.1, 0.5, 0.9]))).eval()
    forecast = model(batch["x"], batch["marks"])
    model.gives_values = True
    values = model(batch["x"], batch["marks"], mode="predict")
    torch.testing.assert_close(values[..., 0], forecast)
    torch.testing.assert_close(values[..., 2], forecast)
    assert (values[..., 1:].diff(dim=-1) >= 0).all()
    raw = model.raw_forecast(batch["x"], batch["marks"])
    others = [forecast + other * raw.scale for other in raw.others.unbind(-1)]
    assert (others[0] > others[1]).any()  # they cross
    observed = (torch.rand(forecast.shape) < 0.5).float()
    observed[0] = 0.0
    for known in (None, observed):
        seen = torch.ones_like(forecast) if known is None else known
        each = []
        for level, quantile in zip((0.1, 0.9), others):
            error = batch["y"] - quantile
            pinball = torch.where(error > 0, level * error, (level - 1) * error) * seen
            each += [2 * p.sum() / max(k.sum(), 1) for p, k in zip(pinball, seen)]
        y = torch.where(seen > 0, batch["y"], torch.tensor(float("nan")))
        losses = model(**{**batch, "y": y}, observed=known, mode="loss")
        torch.testing.assert_close(losses["loss_quantiles"], torch.stack(each).mean())
        assert torch.isfinite(losses["loss_forecast"])


def test_losses_of_points_are_torchs_and_means_of_windows(batch):
    observed = torch.ones_like(batch["y"])
    observed[0, 3:] = 0.0
    hidden = torch.where(observed > 0, batch["y"], torch.tensor(float("nan")))
    for name, loss in {"l1": F.l1_loss, "l2": F.mse_loss, "huber": F.smooth_l1_loss}.items():
        model = TimeBridge(**settings((1, 1, 0), loss=name)).eval()
        forecast = model(batch["x"], batch["marks"])
        torch.testing.assert_close(model(**batch, mode="loss")["loss"], loss(forecast, batch["y"]))
        parts = [
            loss(forecast[:1, :3], batch["y"][:1, :3]),
            *[loss(forecast[[n]], batch["y"][[n]]) for n in range(1, 5)],
        ]
        masked = model(batch["x"], batch["marks"], hidden, observed, mode="loss")["loss"]
        torch.testing.assert_close(masked, torch.stack(parts).mean())
    with pytest.raises(ConfigError, match="l1, l2, huber"):
        TimeBridge(**settings((1, 1, 0), loss="mape"))


def test_gradients_of_constant_series_are_finite(batch):
    model = TimeBridge(**settings((1, 1, 1))).eval()
    constant = {**batch, "x": torch.full((5, 48, 3), 7.0), "y": torch.full((5, 12, 3), 7.0)}
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(**constant, mode="loss")["loss"]
        model.zero_grad()
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"lookback": 50, "period": 15}, "period=15"),
        ({"lookback": 4}, "period=6"),
        ({"num_heads": 5}, "num_heads=5"),
        ({"stable_len": 17}, "stable_len=17"),
        ({"num_patches_out": 2, "downsampling_layers": 0}, "num_patches_out=2"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(wrong, named):
    with pytest.raises(ConfigError, match=named):
        TimeBridge(**{**SMALL, **wrong})


@pytest.mark.parametrize("p", [0.15, 0.999])
def test_dropout_drops_the_share_independently_keeps_the_mean_and_follows_the_seed(p):
    torch.manual_seed(0)
    x = torch.ones(100_001, 5, requires_grad=True)  # a number of elements that no draw of four divides
    kept = dropout(x, p)
    share = (kept == 0).float().mean().item()
    assert share == pytest.approx(p, abs=4 * (p * (1 - p) / x.numel()) ** 0.5 + 2**-16)
    torch.testing.assert_close(kept[kept != 0], torch.full_like(kept[kept != 0], 1 / (1 - p)), rtol=0.01, atol=0)
    assert (torch.corrcoef(kept.detach().t()) - torch.eye(5)).abs().max() < 0.02
    kept.sum().backward()
    assert torch.equal(x.grad, kept.detach())
    torch.manual_seed(0)
    assert torch.equal(dropout(x, p), kept)


@pytest.mark.parametrize(("horizon", "alpha"), [(7, 1.0), (96, 0.0), (2048, 0.35)])
def test_the_loss_and_its_gradient_equal_those_of_the_fft(horizon, alpha):
    """Also of a forecast that is its target, where both are 0."""
    torch.manual_seed(0)
    prediction, target = torch.randn(4, horizon, 3, requires_grad=True), torch.randn(4, horizon, 3)
    target[1] = prediction[1].detach()
    ours = TimeFrequencyLoss(horizon, alpha)
    loss, expected = ours(prediction, target), plain_loss(prediction, target, alpha)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(each, prediction)[0] for each in (loss, expected))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5 / horizon)
    half = prediction.detach().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours(half, target), ours(half.float(), target))
