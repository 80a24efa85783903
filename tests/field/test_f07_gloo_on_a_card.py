"""F7: gloo was named as "compatible with GCU", and then failed on the first tensor of a card.

Gloo takes tensors on the CPU and on CUDA cards only.

With exp, `backend.process_group=gloo` on such a card really works: each collective copies to the CPU and back. It says
that it does, on every rank, and counts the bytes.
"""

from __future__ import annotations

import json

from tests.field.conftest import CARDS, JOIN
from tests.simulators import needs_card, needs_current_card


@needs_current_card
def test_stock_gloo_fails_on_the_first_tensor_of_a_card(stock):
    script = (
        JOIN
        + """
import torch_gcu
torch.gcu.set_device(rank)
join("gloo")
dist.all_reduce(torch.ones(1, device="gcu"))
"""
    )
    (ended,) = stock(script, card=True)
    assert ended.returncode == 1
    assert "No backend type associated with device type gcu" in ended.printed.splitlines()[-1]


@needs_card
def test_exp_stages_them(exp):
    done = exp(*CARDS, "nproc=2", "backend.process_group=gloo", "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert "FALLBACK on every rank: gloo, staged through the CPU" in done.stdout
    assert exp.result("run")["fallback"]["reason"] == "backend.process_group names gloo"
    lines = [json.loads(line) for line in (exp.path("run") / "metrics.jsonl").read_text().splitlines()]
    assert all(line["staged_bytes_per_step"] > 0 for line in lines if line["split"] == "train")
