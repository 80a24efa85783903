"""The doctor on ranks that are ill in one way each; more of it is in tests/behaviour/test_machine.py."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from exp.backends._monitor import reading
from exp.backends.cpu import CpuBackend

from exp.doctor.operator_check import check_operators
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
    (choices / "sick_cards.yaml").write_text("_target_: tests.tasks.sick.SickCards\nname: sick_cards\nsimulate: true\n")

    def run(*arguments, sick=None, output="run", timeout_s=60, **environment):
        settings = ["--config-dir", "my_conf", "task=doctor", f"output_dir={output}", "task.burst_s=0.3"]
        shell = {"PYTHONPATH": str(ROOT), "SICK": json.dumps(sick or {}), **environment}
        done = exp(*settings, f"task.timeout_s={timeout_s}", *arguments, **shell)
        assert "Traceback" not in done.stdout + done.stderr
        path = exp.path(output) / "doctor.json"
        return done, json.loads(path.read_text()) if path.exists() else {}

    return run


def findings(report, status="failed"):
    """Ranks by the check that they failed."""
    return {found["check"]: found["ranks"] for found in report["findings"] if found["status"] == status}


def test_a_card_too_few_then_a_rank_that_never_arrives(doctor):
    done, report = doctor("backend=sick", "nproc=2", sick={1: "no card"})
    assert (done.returncode, findings(report)) == (1, {"device": [1]}), done.stdout
    # In the same folder: nothing of the earlier examination may be taken for this one's.
    done, report = doctor("backend=sick", "nproc=2", sick={1: "never starts"}, timeout_s=TIMEOUT_S)
    assert (done.returncode, findings(report)) == (1, {"ranks": [1]}), done.stdout


def test_ranks_that_are_ill_do_not_hide_each_other(doctor, tmp_path):
    (tmp_path / "monitor.json").write_text(
        json.dumps([reading(0, utilisation_percent=98), reading(1, utilisation_percent=0, state="Sleep")])
    )
    sick = {0: "slow", 1: "full", 2: "breaks", 3: "other library"}
    done, report = doctor("backend=sick", "nproc=4", sick=sick, SICK_MONITOR=str(tmp_path / "monitor.json"))
    assert done.returncode == 1
    assert findings(report) == {"memory": [1], "utilisation": [1], "autocast": [2], "burst": [2]}, done.stdout
    assert findings(report, "warning") == {"burst": [0], "packages": [3]}


@pytest.mark.parametrize("size", ["256k", "16k"])
def test_a_full_disk(doctor, tmp_path, size):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    try:
        done, report = doctor("backend=cpu", output="disk/run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert done.returncode == 1
    assert str(disk / "run") in done.stdout + done.stderr
    if report:
        assert findings(report) == {"output": [0]}


def test_bytes_that_nobody_counts_are_not_told_as_none():
    class Counts(CpuBackend):
        told: ClassVar = [{"tan": (7, 0)}, {"tan": (10, 0)}, {}, {"tan": (3, 4096)}]

        def fallbacks(self):
            return self.told.pop(0)

    for expected in ("tan run on the CPU", "tan run on the CPU (4 KiB)"):
        found = check_operators(Counts(name="cpu"), torch.device("cpu"), "fp32")
        assert found.values["left_device"] == {"tan": 3}
        assert found.finding.endswith(expected)


@needs_current_card
def test_a_training_that_does_not_fit_is_told_with_the_batch_that_does(doctor):
    fits = ["backend=gcu_simulated", "model.d_model=32", "model.d_ff=32", "model.num_heads=2", "data.eval_batch_size=4"]
    done, report = doctor(*fits, timeout_s=120)
    assert (done.returncode, report["verdict"], report["findings"]) == (0, "ok", [])
    assert 0 < report["training"]["memory_peak"] < report["training"]["free"]
    (operators,) = (check["values"] for check in report["ranks"][0]["checks"] if check["name"] == "operators")
    assert {"native_layer_norm_backward", "threshold_backward"} <= set(operators["lacking"])
    assert "native_layer_norm_backward" in operators["portable"]
    assert operators["left_device"] == {}
    done, report = doctor(*fits, "global_batch_size=262144", "overwrite=true", timeout_s=120)
    assert (done.returncode, report["verdict"], report["findings"]) == (0, "ok", [])
    assert report["training"]["fits"] is False
    batch, accumulate = map(int, re.findall(r"=(\d+)", report["training"]["advice"]))
    assert batch * accumulate == 262144
    assert accumulate > 1


@needs_card
@pytest.mark.parametrize(
    ("argument", "status"), [("backend.allow_fallback=true", "failed"), ("backend.process_group=gloo", "warning")]
)
def test_a_group_that_falls_back(doctor, argument, status):
    done, report = doctor("backend=sick_cards", "nproc=2", argument, sick={1: "lacks collectives"})
    assert done.returncode == (1 if status == "failed" else 0), done.stdout
    assert findings(report, status) == {"group": [0, 1]}
    # Copies through the CPU are slow, and must add up all the same.
    checks = [check for rank in report["ranks"] for check in rank["checks"] if check["name"] in ("all_reduce", "ddp")]
    assert {check["status"] for check in checks} == {"ok"}
