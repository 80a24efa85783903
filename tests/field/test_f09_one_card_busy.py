"""F9: only card 0 was busy, 7 asleep: the job had been started as one process, or its environment was half set.

With exp, nproc=8 starts eight processes or fails. Each prints where it is, and ranks that share a card are refused.
"""

from __future__ import annotations

import re

from tests.field.conftest import CARDS
from tests.simulators import needs_card, needs_current_card


@needs_current_card
def test_stock_script_uses_one_card_whatever_the_environment_says(stock):
    script = """
        import torch, torch_gcu
        model = torch.nn.Linear(100, 100).to("gcu")
        print([torch.gcu.memory_allocated(card) > 0 for card in range(8)])
    """
    (ended,) = stock(script, card=True, WORLD_SIZE="8")
    assert ended.printed.splitlines()[-1] == str([True] + 7 * [False])


@needs_card
def test_exp_uses_as_many_as_it_was_told_to(exp):
    done = exp(*CARDS, "nproc=4", "output_dir=run", WORLD_SIZE="8", LOCAL_RANK="0")
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^rank (\d)/4  local_rank (\d)  \w+:(\d)  \S*eccl  \S+$", done.stdout, re.MULTILINE)
    assert lines == [(str(rank),) * 3 for rank in range(4)]
    assert [device["index"] for device in exp.result("run")["devices"]] == [0, 1, 2, 3]


@needs_current_card
def test_exp_refuses_ranks_that_share_a_card(exp, library):
    mine = library("""
        from exp.backends.gcu import GcuBackend
        class First(GcuBackend):
            def set_device(self, local_rank):
                return super().set_device(0)
    """)
    (exp.folder / "conf" / "backend").mkdir(parents=True)
    (exp.folder / "conf" / "backend" / "first.yaml").write_text("_target_: mine.First\nname: gcu\n")
    settings = [setting for setting in CARDS if not setting.startswith("backend=")]
    done = exp("--config-dir", "conf", "backend=first", *settings, "nproc=2", "output_dir=run", **mine)
    assert done.returncode == 1
    assert "ranks 0 and 1 share one card" in done.stderr.splitlines()[0]
