"""The doctor on ranks that are ill in one way each; more of it is in tests/behaviour/test_machine.py."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from exp.backends._monitor import reading
from exp.backends.cpu import CpuBackend

from exp.checks.doctor import CHECKS
from exp.hardware.backend import Capabilities
from exp.hardware.compat import dispatch_mode
from tests.simulators import needs_card

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 20
"""Where a rank does not come: short, but longer than any check of the other one takes on a busy machine."""


@pytest.fixture
def doctor(exp):
    """Runs the doctor, and gives its exit code and report; backends of tests.checks.sick are ill as ``sick`` says."""
    choices = exp.path("my_conf") / "backend"
    choices.mkdir(parents=True)
    (choices / "sick.yaml").write_text("_target_: tests.checks.sick.SickBackend\nname: sick\n")

    def run(*arguments, sick=None, timeout_s=60, **environment):
        settings = ["--config-dir", "my_conf", "task=doctor", "output_dir=run", "task.burst_s=0.3"]
        shell = {"PYTHONPATH": str(ROOT), "SICK": json.dumps(sick or {}), **environment}
        done = exp(*settings, f"task.timeout_s={timeout_s}", *arguments, **shell)
        assert "Traceback" not in done.stdout + done.stderr
        return done, json.loads((exp.path("run") / "doctor.json").read_text())

    return run


def findings(report, status="failed"):
    """Ranks by the check that they failed."""
    found = [(each["check"], rank) for each in report["findings"] for rank in each["ranks"] if each["status"] == status]
    return {check: sorted(rank for other, rank in found if other == check) for check, _ in found}


def test_ranks_that_are_ill_do_not_hide_each_other_and_one_that_never_arrives_is_named(doctor, tmp_path):
    readings = [reading(0, utilization_percent=98), reading(1, utilization_percent=0, state="Sleep")]
    (tmp_path / "monitor.json").write_text(json.dumps(readings))
    sick = {0: "slow", 1: "full", 2: "breaks", 3: "other library"}
    done, report = doctor("backend=sick", "nproc=4", sick=sick, SICK_MONITOR=str(tmp_path / "monitor.json"))
    assert done.returncode == 1
    assert findings(report) == {"memory": [1], "autocast": [2], "burst": [1, 2]}, done.stdout
    assert findings(report, "warning") == {"burst": [0], "packages": [3]}
    # In the same folder: nothing of the earlier examination may be taken for this one's.
    done, report = doctor("backend=sick", "nproc=2", sick={1: "never starts"}, timeout_s=TIMEOUT_S)
    assert (done.returncode, findings(report)) == (1, {"ranks": [1]}), done.stdout


@needs_card
def test_a_group_that_copies_through_the_cpu_is_a_warning_and_adds_up_all_the_same(doctor):
    done, report = doctor("backend=gcu", "backend.simulate=true", "nproc=2", "backend.process_group=gloo")
    assert (done.returncode, findings(report, "warning")) == (0, {"group": [0, 1]}), done.stdout
    checks = [check for rank in report["ranks"] for check in rank["checks"] if check["name"] in ("all_reduce", "ddp")]
    assert {check["status"] for check in checks} == {"ok"}


class WrongAtFirst(CpuBackend):
    """Its products are wrong until its monitor is read, which takes a while."""

    right = False

    def autocast(self, precision):
        def call(operator, arguments, keywords):
            result = operator(*arguments, **keywords)
            return result if self.right or "mm" not in str(operator) else result * 2

        return dispatch_mode(call)

    def monitor(self):
        self.right = True
        time.sleep(0.5)
        return []


def context_of(backend):
    config = SimpleNamespace(precision="fp32", task=SimpleNamespace(burst_s=0.02))
    return SimpleNamespace(backend=backend, device=torch.device("cpu"), described={}, config=config)


@pytest.mark.parametrize(
    ("free", "exclusive", "shared"),
    [(4, "failed", "warning"), (6, "warning", "ok"), (49, "warning", "ok"), (51, "ok", "ok")],
)
def test_how_much_of_a_cards_memory_may_be_taken(free, exclusive, shared):
    for is_shared, status in ((False, exclusive), (True, shared)):
        capabilities = Capabilities(shared_device=is_shared)
        backend = SimpleNamespace(usage=lambda: {"free": free, "total": 100}, monitor=list, capabilities=capabilities)
        assert CHECKS["memory"].body(SimpleNamespace(backend=backend, described={})).status == status


def test_a_wrong_product_fails_the_burst_also_if_later_ones_are_right():
    assert CHECKS["burst"].body(context_of(WrongAtFirst(name="cpu"))).status == "failed"
