"""task=parity: two backends that agree, and some that do not; and the golden losses."""

from __future__ import annotations

import json

import pytest

from tests import golden
from tests.conftest import TINY
from tests.simulators import needs_card

NAMES = list(golden.SETTINGS)
SMALL = [*(setting for setting in TINY if setting != "backend=cpu"), "task=parity", "reference=cpu", "output_dir=run"]


@needs_card
@pytest.mark.parametrize("name", NAMES)
def test_golden_losses_on_the_cpu_and_on_a_simulated_card(exp, name):
    done = exp(*golden.command(name, ["backend=gcu", "backend.simulate=true"], "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    expected = pytest.approx(golden.read(name), rel=golden.TOLERANCE)
    for run in ("tested", "reference"):
        assert golden.losses(exp.path("run") / run) == expected, run


@pytest.mark.skipif(not needs_card.args[0], reason="the comparison on a simulated card has the CPU's losses, too")
@pytest.mark.parametrize("name", NAMES)
def test_golden_losses_on_the_cpu(exp, name):
    done = exp(*golden.command(name, ["backend=cpu"], "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert golden.losses(exp.path("run") / "tested") == pytest.approx(golden.read(name), rel=golden.TOLERANCE)


NOISY = """
import torch.nn.functional as F
from torch import nn
from exp.forecasting.timebridge import TimeBridge


class Noisy(TimeBridge):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.embedding = Embedding(self.embedding)


class Embedding(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, series):
        return F.dropout(self.inner(series), 0.5, self.training)
"""


def test_two_that_agree_are_reported_with_figures_a_picture_and_what_still_draws_random_numbers(exp):
    (exp.folder / "noisy.py").write_text(NOISY)
    settings = ["model._target_=noisy.Noisy", "backend=cpu", "steps=3"]
    done = exp(*SMALL, *settings, PYTHONPATH=str(exp.folder))
    assert done.returncode == 0, done.stderr
    report = json.loads((exp.path("run") / "parity.json").read_text())
    assert report["agrees"] is True
    assert report["random_modules"] == ["embedding"]
    assert report["loss_differences"] == [0.0, 0.0, 0.0]
    assert report["losses"]["tested"] == report["losses"]["reference"] == golden.losses(exp.path("run") / "tested")
    assert not list(exp.path("run").rglob("trace.npz"))
    assert {found["absolute"] for found in report["largest"].values()} == {0.0}
    assert exp.result("run")["metric"] == 0.0
    assert (exp.path("run") / "plots" / "parity.png").read_bytes().startswith(b"\x89PNG")


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
