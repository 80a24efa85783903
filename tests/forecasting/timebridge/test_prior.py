"""TimeBridge with a transition prior: its terms, its two phases, and what it computes in float32."""

from __future__ import annotations

import pytest
import torch

from exp.compat import TORCH_VERSION
from exp.errors import ConfigError
from exp.forecasting.timebridge import TimeBridgePrior
from exp.forecasting.timebridge.regimes import Regimes
from exp.forecasting.timebridge.transition import ChangingPrior, StationaryPrior

SIZES = {"channels": 7, "lookback": 96, "horizon": 24, "d_model": 16, "d_ff": 16, "num_heads": 2, "prior_hidden": 8}
TERMS = ["loss_forecast", "loss_reconstruction", "loss_stationary_kl", "loss_changing_kl", "loss_hmm"]


@pytest.fixture
def batch():
    torch.manual_seed(3)
    return {"x": torch.randn(4, 96, 7), "y": torch.randn(4, 24, 7), "marks": torch.rand(4, 96, 4) - 0.5}


def make(**settings):
    torch.manual_seed(0)
    return TimeBridgePrior(**{**SIZES, **settings})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, TERMS),
        ({"cointegrated_layers": 1}, TERMS),
        ({"stationary_share": 1.0}, TERMS[:3]),
        ({"stationary_share": 0.0}, [*TERMS[:2], *TERMS[3:]]),
        ({"prior": False}, TERMS[:2]),
    ],
)
def test_terms_are_apart_and_every_parameter_learns(batch, settings, expected):
    model = make(**settings)
    model.start_epoch(0)
    terms = model(**batch, mode="loss")
    assert list(terms) == expected
    assert all(term.dim() == 0 and torch.isfinite(term) for term in terms.values())
    sum(terms.values()).backward()
    # norm0 is kept for the names of the authors' weights; their code does not use it either.
    assert [name for name, p in model.named_parameters() if p.grad is None and ".norm0." not in name] == []


def test_a_change_after_a_flat_lookback_does_not_drown_the_other_terms(batch):
    model = make(stationary_share=0.5, sampling=False)
    model.start_epoch(0)
    usual = model(**batch, mode="loss")["loss_hmm"]
    batch["x"][0, :, 1], batch["y"][0, :, 1] = 0.3, 0.3
    batch["y"][0, 5, 1] = 16.0
    terms = model(**batch, mode="loss")
    assert usual < terms["loss_hmm"] < 2 * usual  # not 1e9
    terms["loss_hmm"].backward()
    assert all(p.grad.abs().max() < 30 for p in model.regimes.parameters())


def test_frozen_regimes_stay_whatever_the_optimizer_does(batch):
    model, again = make(regime_epochs=2), make(regime_epochs=2)
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
    for wrong in ({"stationary_share": 1.2}, {"lags": 96}, {"regimes": 0}, {"prior_hidden": 0}, {"hmm_weight": -1.0},
                  {"quantiles": [0.1, 0.5, 0.9]}):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            make(**wrong)


@pytest.mark.parametrize("compressed", [None, 3])
def test_autocast_does_not_reach_the_densities(compressed):
    torch.manual_seed(0)
    series = torch.randn(4, 120, 7) * 3.0 + 2.0
    regimes, prior = Regimes(4, 4), StationaryPrior(5, lags=2, hidden=8, compressed=compressed)
    changing, embedding = ChangingPrior(2, 2, hidden=8), torch.nn.Embedding(4, 2)

    def densities():
        path = regimes.path(series, frozen=False)
        return [regimes.negative_log_likelihood(series), path.float(), prior(series[..., :5]),
                changing(series[..., 5:], embedding(path))]  # fmt: skip

    exact = densities()
    for dtype in (torch.bfloat16, *([torch.float16] if TORCH_VERSION >= (2, 3) else [])):
        with torch.autocast("cpu", dtype=dtype):
            torch.testing.assert_close(densities(), exact, rtol=0, atol=1e-5)
