"""F16: out of memory: halve the batch by hand, and guess again.

With exp the error says the device, its memory and the batch, and proposes a batch size and an accumulation that keep
the global batch, and with it the result.
"""

from __future__ import annotations

import pytest

from tests.field.conftest import CARDS
from tests.simulators import needs_card, needs_current_card


@needs_current_card
def test_stock_error_tells_bytes_only(stock):
    script = "import torch, torch_gcu\ntorch.empty(64 * 2**20, device='gcu')\n"
    (ended,) = stock(script, card=True, SIM_GCU_MEMORY="64MiB")
    assert ended.returncode == 1
    assert "GCU out of memory. Tried to allocate 256 MiB" in ended.printed.splitlines()[-1]


@pytest.mark.slow
@needs_card
def test_exp_proposes_a_batch_that_keeps_the_global_one(exp):
    small = [setting for setting in CARDS if not setting.startswith("global_batch_size")]
    batch = ["global_batch_size=512", "model.d_model=64", "model.num_heads=4"]
    done = exp(*small, *batch, "output_dir=run", SIM_GCU_MEMORY="24MiB")
    assert done.returncode == 1, done.stdout
    first = done.stderr.splitlines()[0]
    assert "is out of memory at batch_size=512; batch_size=" in first
    assert ":0" in first
    advice, _, _ = first.partition("; ")[2].partition(" keeps the global batch of 512")
    again = exp(*small, *batch[1:], *advice.split(), "output_dir=again", SIM_GCU_MEMORY="24MiB")
    assert again.returncode == 0, again.stderr
    assert exp.result("again")["global_batch_size"] == 512
    assert 6 * 2**20 < exp.result("again")["memory_peak"][0] < 24 * 2**20


@needs_current_card
def test_the_proposal_is_the_same_training(exp):
    small = [setting for setting in CARDS if not setting.startswith("global_batch_size")]
    same = ["global_batch_size=32", "model.attention_dropout=0"]
    for name, accumulate in (("one", 1), ("two", 2)):
        done = exp(*small, *same, f"accumulate={accumulate}", f"output_dir={name}")
        assert done.returncode == 0, done.stderr
    first, second = exp.losses("one"), exp.losses("two")
    assert first.keys() == second.keys()
    assert all(abs(first[step] - second[step]) < 1e-5 * first[step] for step in first)
