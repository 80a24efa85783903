"""F7: gloo was named as "compatible with GCU", and then failed on the first tensor of a card.

Gloo takes tensors on the CPU and on CUDA cards only.

With exp, `backend.process_group=gloo` on such a card really works: each collective copies to the CPU and back. It says
that it does, on every rank, counts the bytes, and trains what eccl trains.
"""

from __future__ import annotations

import json

import pytest

from tests.field.conftest import CARD, CARDS, JOIN, NO_DROPOUT
from tests.simulators import needs_card


@needs_card
def test_stock_gloo_fails_on_the_first_tensor_of_a_card(stock):
    script = """
        join("gloo")
        dist.all_reduce(torch.ones(1, device=kind))
    """
    (ended,) = stock(script, card=True, begin=JOIN + CARD)
    assert ended.returncode == 1
    known = (
        "No backend type associated with device type gcu",
        "unsupported device type xla",
    )  # recent torch, torch 1.10
    assert any(text in ended.last for text in known), ended.last


@needs_card
def test_exp_stages_them(exp, eight_cards):
    # What the configuration says counts, whatever the shell does.
    named = ["backend.process_group=gloo", "output_dir=run"]
    done = exp(*CARDS, NO_DROPOUT, "nproc=2", *named, TORCH_DISTRIBUTED_BACKEND="nonsense")
    assert done.returncode == 0, done.stderr
    assert "FALLBACK on every rank: gloo, staged through the CPU" in done.stdout
    fallback = exp.result("run")["fallback"]
    assert fallback["reason"] == "backend.process_group names gloo"
    assert fallback["used"] == exp.result("run")["process_group"] == "gloo, staged through the CPU"
    for rank in (0, 1):
        assert "fallback: gloo, staged" in (exp.path("run") / "logs" / f"rank{rank}.log").read_text()
    assert eight_cards.result["fallback"] is None
    assert exp.losses("run") == pytest.approx(eight_cards.losses, rel=1e-5)
    lines = [json.loads(line) for line in (exp.path("run") / "metrics.jsonl").read_text().splitlines()]
    # Every gradient goes to the CPU and back once per step.
    assert all(line["staged_bytes_per_step"] > 10_000 for line in lines if line["split"] == "train")
