"""TimeBridge with a transition prior, trained as users do: on one device, on several, and in two parts."""

from __future__ import annotations

import json

import pytest
import torch

from tests.conftest import TINY
from tests.simulators import needs_current_card

PRIOR = [
    *TINY, "experiment=timebridge_prior_etth1", "model.integrated_layers=1", "model.prior_hidden=8", "log_every=1",
    "max_epochs=3", "max_steps=6", "checkpoint.every_steps=3",
]  # fmt: skip
SAME = ["model.sampling=false", "model.attention_dropout=0"]  # what each device draws for itself
TERMS = ["loss_forecast", "loss_reconstruction", "loss_stationary_kl", "loss_changing_kl", "loss_hmm"]


def records(exp, name: str) -> list[dict]:
    lines = exp.path(f"{name}/metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["split"] == "train"]


def train(exp, name: str, *settings: str, **environment: str) -> list[dict]:
    done = exp(*PRIOR, f"output_dir={name}", *settings, **environment)
    assert done.returncode == 0, done.stderr + done.stdout
    return records(exp, name)


def assert_equal_terms(mine: list[dict], other: list[dict]) -> None:
    for one, two in zip(mine, other):
        for term in [*TERMS, "loss"]:
            # Of a divergence, a difference of large numbers, it is the part of the whole loss that counts.
            assert one[term] == pytest.approx(two[term], rel=1e-5, abs=1e-5 * two["loss"]), (one["step"], term)


@pytest.mark.parametrize("phase", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_processes_train_as_one(exp, phase):
    """Regimes frozen from the start, or learning to the end; with as many hidden units as users train with."""
    settings = [*SAME, f"model.regime_epochs={phase}", "model.prior_hidden=384", "max_steps=8"]
    one = train(exp, "one", *settings)
    assert all(set(TERMS) <= set(record) for record in one)
    assert (one[0]["loss_hmm"] == 0) == (phase == 0)
    assert_equal_terms(train(exp, "two", "nproc=2", *settings), one)


@needs_current_card
@pytest.mark.slow
def test_no_operator_leaves_the_card(exp):
    one = train(exp, "one", *SAME)
    cards = train(exp, "cards", "backend=gcu_simulated", "nproc=2", *SAME, SIM_GCU_STRICT="1")
    assert_equal_terms(cards, one)


@pytest.mark.slow
def test_a_run_goes_on_in_either_phase(exp):
    """Regimes are frozen after the first of two epochs of 4 steps; the run is cut in the first, and in the second."""
    settings = ["global_batch_size=1956", "max_epochs=2", "max_steps=8", "nproc=1"]
    train(exp, "whole", *settings, "checkpoint.every_steps=1", "checkpoint.keep_last=9")
    last = torch.load(exp.path("whole/checkpoints/step_00000008.pth"))
    assert bool(last["state_dict"]["regimes.frozen"])
    for step in (3, 6):
        train(exp, f"cut{step}", *settings, f"resume=whole/checkpoints/step_{step:08d}.pth")
        again = torch.load(exp.path(f"cut{step}/checkpoints/step_00000008.pth"))
        for name, weight in last["state_dict"].items():
            assert torch.equal(again["state_dict"][name], weight), (step, name)


@pytest.mark.slow
def test_a_term_that_is_not_finite_is_named_with_step_and_rank(exp):
    done = exp(*PRIOR, "output_dir=run", "nproc=2", "model.initial_log_variance=-300", "model.regime_epochs=5")
    assert done.returncode == 1
    first = done.stderr.splitlines()[0]
    assert "loss_stationary_kl is " in first
    assert "on rank 0, 1 within the 1 steps before step 1" in first
