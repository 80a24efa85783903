"""F19: `ps aux | grep train | wc -l`, `watch efsmi` and `tail -f log` to see whether all cards work.

With exp `task=doctor` goes through the launcher of a real job, examines every rank and card, and fails with a name.
tests/tasks/test_doctor.py has its other cases. There is nothing to reproduce.
"""

from __future__ import annotations

import json

import pytest

from tests.simulators import needs_card

DOCTOR = ["task=doctor", "backend=gcu", "backend.simulate=true", "task.burst_s=0.2", "output_dir=run"]


@pytest.mark.slow
@needs_card
def test_the_doctor_examines_every_card(exp):
    done = exp(*DOCTOR, "nproc=4")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((exp.path("run") / "doctor.json").read_text())
    assert report["verdict"] in ("ok", "warning")
    assert len(report["ranks"]) == 4


@pytest.mark.slow
@needs_card
def test_the_doctor_names_the_rank_without_a_card(exp):
    done = exp(*DOCTOR, "nproc=4", SIM_GCU_COUNT="3")
    assert done.returncode != 0
    assert "rank 3" in done.stdout
    assert "has no card" in done.stdout
