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
def test_the_doctor_names_the_rank_without_a_card(exp):
    done = exp(*DOCTOR, "nproc=2", SIM_GCU_COUNT="1")
    assert done.returncode == 1
    report = json.loads((exp.path("run") / "doctor.json").read_text())
    failed = {(finding["check"], *finding["ranks"]) for finding in report["findings"] if finding["status"] == "failed"}
    assert failed == {("device", 1)}, done.stdout
    assert "local_rank 1 has no card: torch_gcu sees 1" in done.stdout
