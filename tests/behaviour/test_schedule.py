"""The learning rate that a schedule gives, as ``metrics.jsonl`` has it."""

from __future__ import annotations

import json

import pytest

from tests.behaviour.conftest import FORECAST


def test_a_warm_up_reaches_the_rate_and_the_schedule_ends_with_the_shorter_length(exp):
    settings = ["schedule=warmup_cosine", "schedule.warmup_steps=3", "optim.lr=2e-3", "log_every=1", "max_epochs=5"]
    done = exp(*FORECAST, *settings, "max_steps=12", "output_dir=run")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (exp.path("run") / "metrics.jsonl").read_text().splitlines()]
    rates = [record["lr"] for record in records if record["split"] == "train"]
    assert len(rates) == 12
    assert max(rates) == pytest.approx(2e-3)
    assert rates.index(max(rates)) <= 3
    assert rates[-1] < 2e-4
