"""What is drawn on a terminal while runs are elsewhere."""

from __future__ import annotations

import re

from tests.conftest import TINY
from tests.terminal import on_a_terminal


def test_a_sweep(exp):
    sweep = ["-m", *TINY, "output_dir=sweep", "optim.lr=0.001,-1", "sweep.parallel_jobs=1"]
    code, drawn = on_a_terminal(exp.folder, *sweep)
    assert code == 1, drawn
    assert re.search(r"0 of 2 ended, 1 under way, 1 waiting, 0 failed +0:00:\d\d", drawn)
    assert re.search(r"  0 optim.lr=0.001  running.*0:00:\d\d", drawn)
    assert re.search(r"error: 1 optim.lr=-1: .*optim: Adam does not take these settings", drawn)
    assert "1 completed, 1 failed" in drawn
    assert "Traceback" not in drawn
