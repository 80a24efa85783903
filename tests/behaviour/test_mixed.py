"""Cards of several vendors in one job: a CPU, a simulated S60, and one that torch.accelerator finds."""

from __future__ import annotations

import json

import pytest

from tests.behaviour.conftest import STEADY, first_line, ran
from tests.conftest import free_port
from tests.simulators import needs_current_card, needs_legacy_card, plugin_on_path

ANY = [word for word in STEADY if word != "backend=cpu"]
CPU, S60, GENERIC = ["backend=cpu"], ["backend=gcu", "backend.simulate=true"], ["backend=accelerator"]

KILLED = """
import os
from mmengine.hooks import Hook

class Killed(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.backend.name == "gcu" and runner.iter == 2:
            os._exit(7)
"""


@pytest.fixture
def mixed(start):
    """Runs a job with a command for each node, which all end with this code; returns the error that each names."""

    def run(*nodes, code=0):
        job = ["launcher.mixed=true", f"launcher.nnodes={len(nodes)}", "output_dir=run", "launcher.timeout_s=120",
               f"launcher.rdzv_endpoint=127.0.0.1:{free_port()}"]  # fmt: skip
        environment = [
            {**plugin_on_path(), "TOPS_VISIBLE_DEVICES": "5"} if GENERIC[0] in node else {} for node in nodes
        ]
        started = [start(*job, *node, **env) for node, env in zip(nodes, environment)]
        said = [process.communicate(timeout=270) for process in started]
        assert [process.returncode for process in started] == [code] * len(nodes), said
        return [errors[errors.find("error: ") :].splitlines()[0] for _, errors in said if code]

    return run


@pytest.mark.extended
@needs_current_card
def test_three_vendors_train_as_one_and_their_checkpoints_are_interchangeable(exp, mixed):
    ran(exp, *STEADY, "nproc=4", "launcher.share=1", "output_dir=one")
    mixed([*ANY, *CPU], [*ANY, *S60, "nproc=2"], [*ANY, *GENERIC, "data.num_workers=1"])
    one, told = exp.result("one"), exp.result("run")
    assert exp.losses("run") == pytest.approx(exp.losses("one"), rel=1e-7)
    assert told["metrics"] == pytest.approx(one["metrics"], rel=1e-6)
    assert (told["world_size"], told["simulated"], told["batch_size"]) == (4, True, 8)
    assert sorted(told["backend"].split("+")) == ["accelerator", "cpu", "gcu"]
    assert sorted(device["backend"] for device in told["devices"]) == ["accelerator", "cpu", "gcu", "gcu"]
    assert "staged" in told["process_group"]
    ran(exp, *STEADY, "resume=run/checkpoints/step_00000002.pth", "output_dir=later")
    assert exp.losses("later") == pytest.approx({step: exp.losses("one")[step] for step in (3, 4)}, rel=1e-6)
    (exp.path("run")).rename(exp.path("first"))
    resume = "resume=one/checkpoints/step_00000002.pth"
    mixed([*ANY, *CPU, resume, "launcher.share=3"], [*ANY, *S60, "nproc=2", "launcher.shares=[2,1]", resume])
    assert exp.losses("run") == pytest.approx(exp.losses("later"), rel=1e-6)


@pytest.mark.extended
@needs_current_card
def test_a_key_that_differs_and_a_rank_that_fails_are_named_on_both_nodes(exp, mixed):
    for error in mixed([*ANY, *CPU, "seed=1"], [*ANY, *S60, "seed=2"], code=2):
        assert "seed=" in error
        assert "gcu on" in error
        assert "cpu on" in error
    (exp.folder / "killed.py").write_text(KILLED)
    hook = [*ANY, "plugins=[killed]", "hooks=[{type: killed.Killed}]", "overwrite=true"]
    for error in mixed([*hook, *CPU], [*hook, *S60], code=1):
        assert "gcu on" in error
        assert "code 7" in error
    assert exp.result("run")["status"] == "failed"


@pytest.mark.extended
@needs_current_card
def test_the_doctor_examines_a_mixed_job_and_the_estimate_counts_its_bytes(exp, mixed):
    doctor = ["task=doctor", "task.burst_s=0.2"]
    mixed([*doctor, *CPU], [*doctor, *S60, "nproc=2"])
    found = json.loads((exp.path("run") / "doctor.json").read_text())
    assert found["verdict"] in ("ok", "warning")
    assert [rank["verdict"] for rank in found["ranks"]].count("failed") == 0
    assert len(found["ranks"]) == 3
    more = ["launcher.mixed=true", "launcher.nnodes=2", "launcher.rdzv_endpoint=127.0.0.1:1", "output_dir=estimated"]
    ran(exp, *STEADY, "task=estimate", *more)
    estimate = exp.result("estimated")["estimate"]
    assert estimate["exchanged_bytes"] == 4 * estimate["trained_parameters"]


NODES = ["launcher.mixed=true", "launcher.nnodes=2", "launcher.rdzv_endpoint=127.0.0.1:1", "output_dir=run"]


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["launcher.nnodes=1"], 2, "launcher.nnodes"),
        (["wrapper=fsdp"], 2, "wrapper=fsdp"),
        (["wrapper.sync_batchnorm=true"], 2, "wrapper.sync_batchnorm"),
        (["backend.process_group=mpi"], 2, "backend.process_group"),
        pytest.param(["batch_size=8"], 2, "global_batch_size", marks=needs_current_card),
        pytest.param([], 3, "torch 2.1", marks=[needs_legacy_card, pytest.mark.legacy]),
    ],
)
def test_what_vendors_cannot_do_together_is_refused_by_name(exp, words, code, named):
    done = exp("backend=cpu", *NODES, *words)
    assert done.returncode == code, done.stderr
    assert named in first_line(done)
