"""F9: only card 0 was busy, 7 asleep: the job had been started as one process, or its environment was half set.

With exp, nproc=8 starts eight processes or fails. Each prints where it is, ranks that share a card are refused, and a
run that leaves cards idle says so.
"""

from __future__ import annotations

import re

import pytest

from tests.field.conftest import CARD, CARDS, JOIN, OWN_GCU
from tests.simulators import needs_card, needs_current_card


@pytest.mark.slow
@needs_current_card
def test_stock_script_started_as_one_process_uses_one_card(stock):
    script = """
        model = torch.nn.Linear(100, 100).to("gcu")
        print([torch.gcu.memory_allocated(card) > 0 for card in range(8)])
    """
    (ended,) = stock(script, card=True, begin=CARD, WORLD_SIZE="8")
    assert ended.last == str([True] + 7 * [False])


@pytest.mark.slow
@needs_card
def test_stock_script_with_half_the_environment_puts_all_ranks_on_card_0(stock):
    script = """
        del os.environ["LOCAL_RANK"]  # as in a shell where it was forgotten
        plugin.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        print("rank", rank, "on card", plugin.current_device())
    """
    ended = stock(script, world_size=2, card=True, begin=JOIN + CARD)
    assert [each.last for each in ended] == ["rank 0 on card 0", "rank 1 on card 0"]


@needs_card
def test_exp_puts_each_of_eight_ranks_on_its_card(eight_cards):
    # Half a job's variables were set in its shell.
    lines = re.findall(r"^rank (\d)/8  local_rank (\d)  \w+:(\d)  \S*eccl  \S+$", eight_cards.stdout, re.MULTILINE)
    assert lines == [(str(rank),) * 3 for rank in range(8)]
    assert [device["index"] for device in eight_cards.result["devices"]] == list(range(8))
    assert "idle" not in eight_cards.stdout


@needs_card
def test_exp_refuses_more_ranks_than_cards(exp):
    done = exp(*CARDS, "nproc=16", "global_batch_size=32")
    assert done.returncode == 3
    assert "nproc=16 asks for more devices than backend=gcu has here: 8; set nproc=8" in done.stderr.splitlines()[0]


@pytest.mark.slow
@needs_card
def test_exp_refuses_ranks_that_share_a_card_and_tells_of_idle_ones(exp, library):
    mine = library(
        """
        class First(Gcu):
            def set_device(self, local_rank):
                return super().set_device(0)
        """,
        begin=OWN_GCU,
    )
    # eccl itself refuses such ranks, less clearly, where it gets the chance.
    shared = ["nproc=2", "backend._target_=mine.First", "backend.process_group=gloo"]
    done = exp(*CARDS, *shared, "output_dir=run", **mine)
    assert done.returncode == 1
    assert "ranks 0 and 1 share one card" in done.stderr.splitlines()[0]
    assert "6 of 8 gcu devices stay idle; nproc=8 uses all" in done.stdout
