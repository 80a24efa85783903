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
    report = json.loads((exp.path("run") / "parity.json").read_text())
    assert report["losses"]["tested"] == golden.losses(exp.path("run") / "tested")
    assert exp.result("run")["check"]["status"] == "ok"
    assert not list(exp.path("run").rglob("trace.npz"))


def test_what_cannot_be_compared_is_refused(exp):
    for settings, code, named in ((["reference=null"], 2, "reference="), (["reference=cuda"], 3, "backend=cuda")):
        done = exp(*SMALL, "backend=cpu", *settings)
        assert done.returncode == code
        assert named in done.stderr.splitlines()[0]
        assert not exp.path("run").exists()
