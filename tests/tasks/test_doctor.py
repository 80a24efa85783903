"""The doctor on ranks that are ill in one way each; more of it is in tests/behaviour/test_machine.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from exp.backends._monitor import reading
from exp.backends.cpu import CpuBackend

from exp.checks.doctor import operators
from tests.simulators import needs_card, needs_current_card

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 45
"""Where a rank does not come: short, but longer than the ranks of a busy machine are apart when they start."""


@pytest.fixture
def doctor(exp):
    """Runs the doctor, and gives its exit code and report; backends of tests.tasks.sick are ill as ``sick`` says."""
    choices = exp.path("my_conf") / "backend"
    choices.mkdir(parents=True)
    (choices / "sick.yaml").write_text("_target_: tests.tasks.sick.SickBackend\nname: sick\n")

    def run(*arguments, sick=None, timeout_s=60, **environment):
        settings = ["--config-dir", "my_conf", "task=doctor", "output_dir=run", "task.burst_s=0.3"]
        shell = {"PYTHONPATH": str(ROOT), "SICK": json.dumps(sick or {}), **environment}
        done = exp(*settings, f"task.timeout_s={timeout_s}", *arguments, **shell)
        assert "Traceback" not in done.stdout + done.stderr
        return done, json.loads((exp.path("run") / "doctor.json").read_text())

    return run


def findings(report, status="failed"):
    """Ranks by the check that they failed."""
    return {found["check"]: found["ranks"] for found in report["findings"] if found["status"] == status}


def test_ranks_that_are_ill_do_not_hide_each_other_and_one_that_never_arrives_is_named(doctor, tmp_path):
    readings = [reading(0, utilisation_percent=98), reading(1, utilisation_percent=0, state="Sleep")]
    (tmp_path / "monitor.json").write_text(json.dumps(readings))
    sick = {0: "slow", 1: "full", 2: "breaks", 3: "other library"}
    done, report = doctor("backend=sick", "nproc=4", sick=sick, SICK_MONITOR=str(tmp_path / "monitor.json"))
    assert done.returncode == 1
    assert findings(report) == {"memory": [1], "utilisation": [1], "autocast": [2], "burst": [2]}, done.stdout
    assert findings(report, "warning") == {"burst": [0], "packages": [3]}
    # In the same folder: nothing of the earlier examination may be taken for this one's.
    done, report = doctor("backend=sick", "nproc=2", sick={1: "never starts"}, timeout_s=TIMEOUT_S)
    assert (done.returncode, findings(report)) == (1, {"ranks": [1]}), done.stdout


def test_bytes_that_nobody_counts_are_not_told_as_none():
    class Counts(CpuBackend):
        told: ClassVar = [{"tan": (7, 0)}, {"tan": (10, 0)}, {}, {"tan": (3, 4096)}]

        def fallbacks(self):
            return self.told.pop(0)

    for expected in ("tan run on the CPU", "tan run on the CPU (4 KiB)"):
        found = operators(Counts(name="cpu"), torch.device("cpu"), "fp32")
        assert found.values["left_device"] == {"tan": 3}
        assert found.finding.endswith(expected)


@needs_current_card
def test_a_training_that_does_not_fit_is_told_with_the_batch_that_does(doctor):
    fits = ["backend=gcu_simulated", "model.d_model=32", "model.d_ff=32", "model.num_heads=2", "data.eval_batch_size=4"]
    done, report = doctor(*fits, timeout_s=120)
    assert (done.returncode, report["findings"]) == (0, [])
    assert 0 < report["training"]["memory_peak"] < report["training"]["free"]
    (operators,) = (check["values"] for check in report["ranks"][0]["checks"] if check["name"] == "operators")
    assert "native_layer_norm_backward" in {*operators["lacking"]} & {*operators["portable"]}
    assert operators["left_device"] == {}
    done, report = doctor(*fits, "global_batch_size=262144", "overwrite=true", timeout_s=120)
    assert (done.returncode, report["findings"], report["training"]["fits"]) == (0, [], False)
    batch, accumulate = map(int, re.findall(r"=(\d+)", report["training"]["advice"]))
    assert (batch * accumulate, accumulate > 1) == (262144, True)


@needs_card
def test_a_group_that_copies_through_the_cpu_is_a_warning_and_adds_up_all_the_same(doctor):
    done, report = doctor("backend=gcu", "backend.simulate=true", "nproc=2", "backend.process_group=gloo")
    assert (done.returncode, findings(report, "warning")) == (0, {"group": [0, 1]}), done.stdout
    checks = [check for rank in report["ranks"] for check in rank["checks"] if check["name"] in ("all_reduce", "ddp")]
    assert {check["status"] for check in checks} == {"ok"}
