"""task=parity: two backends that agree, and some that do not; and the golden losses."""

from __future__ import annotations

import json

import pytest

from tests import golden
from tests.conftest import TINY
from tests.simulators import needs_card

SMALL = [*(setting for setting in TINY if setting != "backend=cpu"), "task=parity", "reference=cpu", "output_dir=run"]


@pytest.mark.parametrize("name", golden.SETTINGS)
def test_golden_losses_on_the_cpu_and_where_there_is_one_on_a_simulated_card(exp, name):
    backend = ["backend=cpu"] if needs_card.args[0] else ["backend=gcu", "backend.simulate=true"]
    done = exp(*golden.command(name, backend, "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    for run in ("tested", "reference"):
        assert golden.losses(exp.path("run") / run) == pytest.approx(golden.read(name), rel=golden.TOLERANCE), run


NOISY = """
import torch.nn.functional as F
from torch import nn
from exp.forecasting.timebridge import TimeBridge


class Noisy(TimeBridge):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.embedding = nn.Sequential(self.embedding, Drops())


class Drops(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)
"""


def test_two_that_agree_are_reported_with_figures_and_what_still_draws_random_numbers(exp):
    (exp.folder / "noisy.py").write_text(NOISY)
    done = exp(*SMALL, "model._target_=noisy.Noisy", "backend=cpu", "steps=3", PYTHONPATH=str(exp.folder))
    assert done.returncode == 0, done.stderr
    report = json.loads((exp.path("run") / "parity.json").read_text())
    found = {key: report[key] for key in ("agrees", "random_modules", "loss_differences")}
    assert found == {"agrees": True, "random_modules": ["embedding.1"], "loss_differences": [0.0, 0.0, 0.0]}
    assert report["losses"]["tested"] == report["losses"]["reference"] == golden.losses(exp.path("run") / "tested")
    assert {found["absolute"] for found in report["largest"].values()} == {0.0}
    assert not list(exp.path("run").rglob("trace.npz"))


def test_what_cannot_be_compared_is_refused(exp):
    for settings, code, named in (
        (["reference=null"], 2, "reference="),
        (["reference=cuda"], 3, "backend=cuda"),
        (["steps=0"], 2, "steps=0"),
        (["task=train"], 2, "task=parity"),
    ):
        done = exp(*SMALL, "backend=cpu", *settings)
        assert done.returncode == code
        assert named in done.stderr.splitlines()[0]
        assert not exp.path("run").exists()
