"""Notice to end: the state is saved between two steps, and the continued run is the run that would have been."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from tests.behaviour.conftest import LONG, TINY, family, gone, has_steps, result, wait_for

STEPS = [*TINY, "max_epochs=2", "max_steps=60", "log_every=5", "checkpoint.every_epochs=0"]


@pytest.mark.legacy
@pytest.mark.parametrize(("nproc", "loaders"), [(2, 0), pytest.param(1, 1, marks=pytest.mark.extended)])
def test_a_signal_to_every_process_saves_and_the_run_goes_on_exactly(exp, start, nproc, loaders):
    """Slurm sends its signal to every process of a job step: agent, workers and their loaders as well."""
    settings = [*STEPS, f"nproc={nproc}", f"data.num_workers={loaders}"]
    run = exp.path("run")
    process = start(*settings, "max_steps=4000", "max_epochs=1000", "output_dir=run")
    wait_for(has_steps(run), process)
    everybody = family(process.pid)
    for pid in everybody:
        os.kill(pid, signal.SIGUSR2)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 75, errors
    assert gone(everybody)
    told = result(run)
    assert told["status"] == "preempted"
    assert "resume=auto" in output + errors
    (saved,) = run.glob("checkpoints/step_*.pth")
    assert saved.name == f"step_{told['steps']:08d}.pth"
    assert f"checkpoints/{saved.name}" in told["digests"]
    end = ["max_epochs=1000", f"max_steps={told['steps'] + 5}"]
    done = exp(*settings, *end, "output_dir=run", "resume=auto")
    assert done.returncode == 0, done.stderr
    exp.train("whole", *settings, *end)
    assert exp.result("run")["metrics"] == exp.result("whole")["metrics"]
    assert exp.losses("run") == exp.losses("whole")  # also of the lines between which the run was interrupted
    last = f"checkpoints/step_{told['steps'] + 5:08d}.pth"
    one, other = (torch.load(str(exp.path(name) / last))["state_dict"] for name in ("run", "whole"))
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


def test_a_second_signal_ends_at_once_and_what_saves_no_state_has_nothing_to_wait_for(exp, trained, start):
    process = start("task=eval", f"init_from={trained('forecast')}", "backend=cpu", "nproc=2", "data.eval_batch_size=1",
                    "output_dir=tested")  # fmt: skip
    wait_for((exp.path("tested") / "logs" / "rank1.log").is_file, process)
    everybody = family(process.pid)
    os.kill(process.pid, signal.SIGUSR2)
    output, errors = process.communicate(timeout=280)
    assert process.returncode in (75, 128 + signal.SIGUSR2), output + errors
    assert gone(everybody)
    assert "Traceback" not in output + errors


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_ctrl_c_and_other_signals_say_how_to_go_on(exp, start, number):
    process = start(*LONG, "checkpoint.every_steps=2", "output_dir=run")
    wait_for(lambda: list(exp.path("run").glob("checkpoints/step_*.pth")), process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 128 + number, errors
    assert errors.startswith(f"error: interrupted by {signal.Signals(number).name}")
    assert "resume=auto" in output + errors
    assert "Traceback" not in output + errors


@pytest.mark.extended
def test_sigterm_to_every_process_of_a_job_loses_no_step(exp, start):
    """As ``scancel`` and ``scontrol requeue`` send it: to all that belong to the job's step."""
    where = ["launcher=submitit", "launcher.cluster=debug", "nproc=2", "output_dir=run"]
    process = start(*LONG, *where)
    wait_for(has_steps(exp.path("run")), process)
    for pid in family(process.pid):
        os.kill(pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 75, output + errors
    assert len(list(exp.path("run").glob("checkpoints/step_*.pth"))) == 1
