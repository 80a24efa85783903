"""TimeBridge with a transition prior: its terms and phases; and checkpoints of the users' variant, made here in its own
form, against a plain re-computation from their tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from reference_timebridge import PlainTimeBridge, plain_loss
from torch import nn
from torch.distributions import Normal

from exp.errors import ConfigError
from exp.forecasting.timebridge.hmm import log_likelihood, viterbi
from exp.forecasting.timebridge.model import TimeBridge
from exp.forecasting.timebridge.prior import TimeBridgePrior
from exp.hardware.compat import TORCH_VERSION
from tests.forecasting.timebridge.conftest import log_density

SIZES = {"lookback": 48, "period": 12, "num_patches_out": 2, "d_model": 8, "d_ff": 12, "num_heads": 2}
SIZES.update(integrated_layers=1, downsampling_layers=1, cointegrated_layers=1)
HORIZON, CLASSES, EMBEDDING, LAGS = 24, 4, 2, 2
TERMS = ["loss_forecast", "loss_reconstruction", "loss_stationary_kl", "loss_nonstationary_kl", "loss_hmm"]
NEVER_READ = ("encoder_zc.stationary_dist.0.weight", "encoder_zd.enc_embedding.0.weight", "encoder_u.trans.0.weight",
              "encoder_u.initial_prob", "encoder_u.transition_matrix.0.weight", "final_mlp.0.weight")  # fmt: skip


def mlp(inputs, hidden):
    layers = nn.Sequential(nn.Linear(inputs, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, 1))
    return nn.Sequential(OrderedDict(net=layers))


class Variant:
    """The tensors of the variant's ``Model`` under its names, and what is computed from them."""

    def __init__(self, channels, hidden=6):
        torch.manual_seed(0)
        self.split = int(channels * 0.7)
        compressed, split = self.split > 100, self.split
        context = 10 if compressed else LAGS * split
        self.stationary = nn.ModuleList(mlp(context + 1, 3 if channels >= 100 else hidden) for _ in range(split))
        self.changing = nn.ModuleList(mlp(EMBEDDING + 1, hidden) for _ in range(channels - split))
        compress = nn.Linear(LAGS * split, 10)
        self.context = compress if compressed else nn.Identity()
        self.embedding = nn.Embedding(CLASSES, EMBEDDING)
        sizes = {"observation_means": [channels], "observation_stddevs": [channels], "log_pi": [], "log_A": [CLASSES]}
        self.regimes = nn.ParameterDict({name: nn.Parameter(torch.randn(CLASSES, *sizes[name])) for name in sizes})
        self.regimes["observation_stddevs"].data[1, 2] = -0.3  # an emission of the least deviation
        parts = {
            "encoder_zc.stationary_transition_prior.gs": self.stationary,
            "encoder_zc.stationary_transition_prior.compress": compress,
            "encoder_zd.nonstationary_transition_prior.gs": self.changing,
            "encoder_u": self.regimes,
            "c_embeddings": self.embedding,
        }
        self.state = {f"{part}.{key}": value for part in parts for key, value in parts[part].state_dict().items()}
        self.state.update({name: torch.randn(2, 3) for name in NEVER_READ})
        self.bridges = {}
        for number in ("", "1"):
            forecast, past = (PlainTimeBridge(channels=channels, horizon=length, **SIZES).eval()
                              for length in (HORIZON, SIZES["lookback"]))  # fmt: skip
            for parameter in (*forecast.parameters(), *past.parameters()):  # zeros and ones would hide mistakes
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
            decoder = past.decoder[1].weight.detach().clone()
            past.load_state_dict({**forecast.state_dict(), "decoder.1.weight": decoder})
            self.bridges[number] = past, forecast
            for key, value in forecast.state_dict().items():
                first, _, remainder = key.partition(".")
                self.state[f"{first}{number}.{remainder}"] = value
            self.state[f"decoder{number}_x.1.weight"] = decoder

    def terms(self, batch):
        """Those of ours at the latents' mean, unweighted."""
        mean, std = batch["x"].mean(1, keepdim=True), batch["x"].std(1, keepdim=True)
        observed, second = (
            torch.cat([bridge(batch["x"], batch["marks"]) for bridge in self.bridges[number]], dim=1)
            for number in ("", "1")
        )
        z, log_variance, lookback = (observed - mean) / std, (second - mean) / std, SIZES["lookback"]
        series = (torch.cat([batch["x"], batch["y"]], dim=1) - mean) / (std + 1e-5)
        posterior = Normal(z, (log_variance / 2).exp()).log_prob(z)
        split, early = self.split, z[..., : self.split]
        lagged = torch.cat([early[:, lag : lag - LAGS] for lag in range(LAGS)], dim=-1)
        later = log_density(self.stationary, self.context(lagged), early[:, LAGS:])
        prior = torch.cat([Normal(0.0, 1.0).log_prob(early[:, :LAGS]).sum(-1), later], dim=1)
        means, deviations = (self.regimes[f"observation_{name}"][:, :4] for name in ("means", "stddevs"))
        emissions = Normal(means, deviations.relu() + 0.1).log_prob(series[:, :, None, :4]).sum(-1)
        regimes = emissions, self.regimes["log_pi"].log_softmax(0), self.regimes["log_A"].log_softmax(1)
        changing = log_density(self.changing, self.embedding(viterbi(*regimes)), z[..., split:])
        return {
            "loss_forecast": plain_loss(observed[:, lookback:], batch["y"], 0.35),
            "loss_reconstruction": plain_loss(observed[:, :lookback], batch["x"], 0.35),
            "loss_stationary_kl": (posterior[..., :split].sum(-1) - prior).mean(),
            "loss_nonstationary_kl": (posterior[..., split:].sum(-1) - changing).mean(),
            "loss_hmm": -log_likelihood(*regimes).mean() / series.shape[1],
        }


def ours(channels, **settings):
    weights = {f"{name}_weight": 1.0 for name in ("reconstruction", "stationary_kl", "nonstationary_kl", "hmm")}
    sizes = {**SIZES, "channels": channels, "horizon": HORIZON, "lags": LAGS, "sampling": False, **weights}
    torch.manual_seed(0)
    return TimeBridgePrior(**{**sizes, **settings}).eval()


@pytest.fixture
def batch():
    torch.manual_seed(5)
    series = torch.randn(3, SIZES["lookback"] + HORIZON, 7).cumsum(1)
    marks = torch.rand(3, SIZES["lookback"], 4) - 0.5
    return {"x": series[:, : SIZES["lookback"]], "y": series[:, SIZES["lookback"] :], "marks": marks}


def test_a_checkpoint_of_the_variant_loads_wholly_and_computes_the_same(batch):
    variant, model = Variant(7), ours(7, prior_hidden=6, initial_log_variance=-4.0)
    file = {f"module.{key}": value for key, value in variant.state.items()}
    model.load_state_dict(model.adapt_state_dict(file, Path("checkpoint.pth")), strict=True)
    with torch.no_grad():
        forecast = model(batch["x"], batch["marks"], mode="predict")
        terms = model(**batch, mode="loss")
    torch.testing.assert_close(forecast, variant.bridges[""][1](batch["x"], batch["marks"]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(terms, variant.terms(batch), rtol=1e-5, atol=1e-5)

    plain = TimeBridge(channels=7, horizon=HORIZON, **SIZES).eval()
    for weights in (file, model.state_dict()):  # and of our own variant
        plain.load_state_dict(plain.adapt_state_dict(weights, Path("checkpoint.pth")), strict=True)
        assert torch.equal(plain(batch["x"], batch["marks"]), forecast)


@pytest.mark.parametrize("channels", [120, 150])
def test_from_100_channels_on_it_fits_too(channels):
    """Three hidden units of stationary latents, and a compressed context where these are more than 100."""
    variant, model = Variant(channels), ours(channels, nonstationary_hidden=6)
    model.load_state_dict(model.adapt_state_dict(variant.state, Path("checkpoint.pth")), strict=True)
    z = torch.randn(2, 9, channels)[..., : variant.split]
    lagged = torch.cat([z[:, lag : lag - LAGS] for lag in range(LAGS)], dim=-1)
    expected = log_density(variant.stationary, variant.context(lagged), z[:, LAGS:])
    torch.testing.assert_close(model.stationary_prior(z)[:, LAGS:], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sampling": True}, TERMS),
        ({"sampling": True, "cointegrated_layers": 0}, TERMS),
        ({"stationary_ratio": 1.0}, TERMS[:3]),
        ({"stationary_ratio": 0.0}, [*TERMS[:2], *TERMS[3:]]),
        ({"prior": False}, TERMS[:2]),
    ],
)
def test_terms_are_apart_and_every_parameter_learns(batch, settings, expected):
    model = ours(7, **settings).train()
    model.start_epoch(0)
    terms = model(**batch, mode="loss")
    assert list(terms) == expected
    assert all(term.dim() == 0 and torch.isfinite(term) for term in terms.values())
    sum(terms.values()).backward()
    # norm0 is kept for the names of the authors' weights; their code does not use it either.
    assert [name for name, p in model.named_parameters() if p.grad is None and ".norm0." not in name] == []


def test_a_change_after_a_flat_lookback_does_not_drown_the_other_terms(batch):
    model = ours(7, stationary_ratio=0.5, sampling=False)
    model.start_epoch(0)
    usual = model(**batch, mode="loss")["loss_hmm"]
    batch["x"][0, :, 1], batch["y"][0, :, 1] = 0.3, 0.3
    batch["y"][0, 5, 1] = 16.0
    terms = model(**batch, mode="loss")
    assert usual < terms["loss_hmm"] < 2 * usual  # not 1e9
    terms["loss_hmm"].backward()
    assert all(p.grad.abs().max() < 30 for p in model.regimes.parameters())


def test_frozen_regimes_stay_whatever_the_optimizer_does(batch):
    model, again = ours(7, regime_epochs=2), ours(7, regime_epochs=2)
    for epoch in (1, 2):
        model.start_epoch(epoch)
        assert (model(**batch, mode="loss")["loss_hmm"] == 0) == (epoch == 2)
    path = model.regimes.path(batch["x"], frozen=True)
    for parameter in model.regimes.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    again.load_state_dict(model.state_dict())
    for each in (model, again):
        each.start_epoch(3)
        assert torch.equal(each.regimes.path(batch["x"], frozen=True), path)


def test_wrong_settings_are_refused():
    for wrong in ({"stationary_ratio": 1.2}, {"lags": 96}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ours(7, **wrong)


def test_autocast_does_not_reach_the_densities():
    model = ours(150)  # whose stationary latents' context is compressed
    series = torch.randn(4, 60, 150) * 3.0 + 2.0
    stationary, changing = series.split([105, 45], dim=-1)

    def densities():
        path = model.regimes.path(series, frozen=False)
        return [model.regimes.negative_log_likelihood(series), path.float(), model.stationary_prior(stationary),
                model.nonstationary_prior(changing, model.regime_embedding(path))]  # fmt: skip

    exact = densities()
    for dtype in (torch.bfloat16, *([torch.float16] if TORCH_VERSION >= (2, 3) else [])):
        with torch.autocast("cpu", dtype=dtype):
            torch.testing.assert_close(densities(), exact, rtol=0, atol=1e-5)
