from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from exp.errors import ConfigError
from exp.forecasting.timebridge import TimeBridge
from exp.forecasting.timebridge.quantiles import quantile_loss

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
from reference_timebridge import PlainTimeBridge, plain_loss

SMALL = {"channels": 3, "lookback": 48, "horizon": 12, "period": 6, "d_model": 16, "d_ff": 24, "num_heads": 4}
LAYERS = [(3, 1, 0), (1, 1, 1), (1, 1, 2), (1, 2, 1), (0, 0, 1)]


def settings(layers, **more):
    names = ("integrated_layers", "downsampling_layers", "cointegrated_layers")
    return {**SMALL, **dict(zip(names, layers)), **more}


def batch_of(channels=3, lookback=48, horizon=12, size=5, marks=4):
    torch.manual_seed(1)
    return {
        "x": torch.randn(size, lookback, channels).cumsum(1),
        "marks": torch.rand(size, lookback, marks) - 0.5,
        "y": torch.randn(size, horizon, channels),
    }


def pair(**options):
    """Ours and the plain reference with the same weights, in eval mode."""
    torch.manual_seed(0)
    ours, plain = TimeBridge(**options), PlainTimeBridge(**options)
    plain.load_state_dict(ours.state_dict(), strict=True)
    return ours.eval(), plain.eval()


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("patches_out", [None, 3])
def test_forecast_loss_and_gradients_equal_the_plain_reference(layers, patches_out):
    ours, plain = pair(**settings(layers, num_patches_out=patches_out if layers[1] else None))
    batch = batch_of()
    expected = plain(batch["x"], batch["marks"])
    torch.testing.assert_close(ours(batch["x"], batch["marks"]), expected, rtol=1e-5, atol=1e-5)
    loss, expected_loss = ours(**batch, mode="loss")["loss"], plain_loss(expected, batch["y"], 0.35)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    names = [name for name, _ in plain.named_parameters() if "norm0" not in name]
    gradients = (torch.autograd.grad(each, [model.get_parameter(name) for name in names])
                 for each, model in ((loss, ours), (expected_loss, plain)))  # fmt: skip
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_the_time_features_are_read_only_where_channels_meet():
    batch = batch_of(marks=5)
    alone, _ = pair(**settings((3, 1, 0), time_features=5))
    assert torch.equal(alone(**batch), alone(**{**batch, "marks": batch["marks"] * float("nan")}))
    meeting, plain = pair(**settings((1, 1, 1), time_features=5))
    assert not torch.allclose(meeting(**batch), meeting(**{**batch, "marks": -batch["marks"]}))
    torch.testing.assert_close(meeting(**batch), plain(batch["x"], batch["marks"]), rtol=1e-5, atol=1e-5)


def test_a_period_gives_the_number_of_patches_as_in_the_authors_code():
    sizes = {"lookback": 104, "stable_len": 4, "num_patches_out": 4}  # of the users' illness.sh, period 24
    torch.manual_seed(0)
    ours = TimeBridge(**{**settings((1, 1, 2)), **sizes, "period": 24}).eval()
    plain = PlainTimeBridge(**{**settings((1, 1, 2)), **sizes, "period": 26}).eval()
    plain.load_state_dict(ours.state_dict(), strict=True)
    batch = batch_of(lookback=104)
    torch.testing.assert_close(ours(**batch), plain(batch["x"], batch["marks"]), rtol=1e-5, atol=1e-5)


PUBLISHED = {  # channels, period, patches_out, heads, stable_len, d_model, d_ff, layers
    "etth1": (7, 24, None, 8, 6, 128, 128, (3, 1, 0)),
    "ettm1": (7, 48, 6, 4, 6, 64, 128, (3, 1, 0)),
    "weather": (21, 48, 12, 8, 6, 128, 128, (1, 1, 1)),
    "solar": (137, 48, 12, 8, 6, 128, 128, (1, 1, 1)),
    "electricity": (321, 24, 4, 32, 4, 512, 512, (1, 1, 2)),
    "traffic": (862, 24, 8, 64, 2, 512, 512, (1, 1, 3)),
}


def official_shapes(period, patches_out, d_model, d_ff, layers):
    """Names and shapes of the authors' weights for a lookback of 720 and a horizon of 96."""
    patches = 720 // period
    patches_out = patches_out or patches
    shapes = {"embedding.proj.0.weight": (d_model, period), "decoder.1.weight": (96, patches_out * d_model)}
    kinds = ["integrated"] * layers[0] + ["downsampling"] * layers[1] + ["cointegrated"] * layers[2]
    for index, kind in enumerate(kinds):
        prefix = f"encoder.attn_layers.{index}."
        for attention in ("attention1", "attention2") if kind == "cointegrated" else ("attention",):
            for name in ("q_proj", "k_proj", "v_proj", "out"):
                shapes[f"{prefix}{attention}.{name}.weight"] = (d_model, d_model)
                shapes[f"{prefix}{attention}.{name}.bias"] = (d_model,)
        if kind == "downsampling":
            shapes[f"{prefix}conv1.weight"] = (patches_out, patches, 1)
            shapes[f"{prefix}conv2.weight"] = (patches_out, patches_out + 1, 1)
        for norm in ("norm0", "norm1", "norm2") if kind == "cointegrated" else ("norm1", "norm2"):
            shapes[f"{prefix}{norm}.weight"] = shapes[f"{prefix}{norm}.bias"] = (d_model,)
        shapes.update({f"{prefix}fc1.weight": (d_ff, d_model), f"{prefix}fc1.bias": (d_ff,)})
        shapes.update({f"{prefix}fc2.weight": (d_model, d_ff), f"{prefix}fc2.bias": (d_model,)})
    return shapes


@pytest.mark.parametrize("name", PUBLISHED)
def test_official_weights_load_strictly_and_tell_their_settings(name):
    channels, period, patches_out, heads, stable_len, d_model, d_ff, layers = PUBLISHED[name]
    shapes = official_shapes(period, patches_out, d_model, d_ff, layers)
    state = {key: torch.ones(shape) for key, shape in shapes.items()}
    prefix = "teacher.encoder." if name == "solar" else "module."  # any path before the names is found
    official = {f"{prefix}{key}": value for key, value in state.items()}
    sizes = {"period": period, "num_patches_out": patches_out, "num_heads": heads, "stable_len": stable_len}
    sizes.update(channels=channels, lookback=720, horizon=96, d_model=d_model, d_ff=d_ff)
    model = TimeBridge(**settings(layers, **sizes))
    model.load_state_dict(model.adapt_state_dict(official, Path("official.pth")), strict=True)
    assert all((parameter == 1).all() for parameter in model.parameters())
    assert TimeBridge(**SMALL).settings_of(state) == {
        "model.d_model": d_model, "model.period": period, "model.d_ff": d_ff, "model.num_patches_out": patches_out,
        "model.integrated_layers": layers[0], "model.downsampling_layers": layers[1],
        "model.cointegrated_layers": layers[2], "data.lookback": 720, "data.horizon": 96,
        "model.quantiles": None,
    }  # fmt: skip


@pytest.mark.parametrize("layers", LAYERS)
def test_a_model_tells_its_own_settings(layers):
    model = TimeBridge(**settings(layers))
    told = {key.split(".")[1]: value for key, value in model.settings_of(model.state_dict()).items()}
    expected = {**settings(layers), "num_patches_out": None, "quantiles": None}
    assert told == {key: value for key, value in expected.items() if key not in ("channels", "num_heads")}


def test_quantile_heads_have_the_pinball_loss_and_do_not_cross():
    levels = [0.1, 0.5, 0.9]
    model, batch = TimeBridge(**settings((1, 1, 0), quantiles=levels)).eval(), batch_of()
    model.quantile_decoder[1].weight.data.mul_(-3.0)  # any order
    forecast, quantiles = (model(batch["x"], batch["marks"], mode=mode) for mode in ("predict", "spread"))
    torch.testing.assert_close(quantiles[..., 1], forecast)
    assert (quantiles.diff(dim=-1) >= 0).all()
    low, high = quantile_loss([forecast], batch["y"], [0.1]), quantile_loss([forecast], batch["y"], [0.9])
    error = batch["y"] - forecast
    torch.testing.assert_close(low, 2 * torch.where(error > 0, 0.1 * error, -0.9 * error).mean())
    torch.testing.assert_close((low + high) / 2, plain_loss(forecast, batch["y"], 0.0))  # symmetric: absolute error
    known = (torch.rand(error.shape) < 0.5).float()
    known[0] = 0.0
    y = torch.where(known > 0, batch["y"], torch.tensor(float("nan")))
    each = [(e.abs() * k).sum() / max(k.sum(), 1) for e, k in zip(error, known)]
    torch.testing.assert_close(quantile_loss([forecast], y, [0.5], known), torch.stack(each).mean())
    losses = model(**{**batch, "y": y}, known=known, mode="loss")
    assert all(torch.isfinite(loss) for loss in losses.values())


def test_losses_are_in_float32_and_gradients_finite_also_of_constant_series():
    model, _ = pair(**settings((1, 1, 1)))
    batch = batch_of()
    exact = model(**batch, mode="loss")["loss"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(**batch, mode="loss")["loss"]
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=2e-2)
    constant = {**batch, "x": torch.full((5, 48, 3), 7.0), "y": torch.full((5, 12, 3), 7.0)}
    for loss in (rough, model(**constant, mode="loss")["loss"]):
        model.zero_grad()
        loss.backward()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


def test_settings_and_calls_that_do_not_go_together_are_refused():
    for wrong, named in (
        ({"lookback": 50, "period": 15}, "period=10 or 25"),
        ({"lookback": 4}, "lookback=6, or period=4"),
        ({"num_heads": 5}, "num_heads=4 or 8"),
        ({"stable_len": 17}, "stable_len=17"),
        ({"num_patches_out": 0}, "num_patches_out=null"),
        ({"num_patches_out": 2, "downsampling_layers": 0}, "num_patches_out=null"),
        ({"integrated_layers": -1}, "integrated_layers=-1"),
        ({"attention_dropout": 1.0}, "attention_dropout"),
        ({"alpha": 1.5}, "alpha"),
        ({"period": 0}, "period=0"),
        ({"quantiles": [0.1, 0.9]}, "quantiles"),
        ({"quantiles": [0.5, 0.1]}, "quantiles"),
        ({"quantiles": [0.5, 1.5]}, "quantiles"),
    ):
        with pytest.raises(ConfigError, match=named):
            TimeBridge(**{**SMALL, **wrong})
    for y, mode in ((None, "loss"), (batch_of()["y"], "train")):
        with pytest.raises(ValueError):
            TimeBridge(**SMALL)(**{**batch_of(), "y": y}, mode=mode)
