"""A run folder has one writer at a time, and a holder that has died holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.behaviour.conftest import LONG, family, first_line, gone, has_steps, result, snapshot, wait_for
from tests.conftest import clean_environment


def test_of_two_in_one_folder_one_runs_and_after_kill_9_the_folder_is_free(exp, start):
    settings = [*LONG, "output_dir=run", "checkpoint.every_steps=5", "checkpoint.keep_last=1"]
    run = exp.path("run")
    process = start(*settings)
    wait_for(lambda: list(run.glob("checkpoints/step_*.pth")), process)
    everybody = family(process.pid)
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)  # so that the folder does not change meanwhile
    before = snapshot(run)
    for words in ([], ["resume=auto"], ["overwrite=true"], ["max_steps=1"]):
        done = exp(*settings, *words)
        assert done.returncode == 2, (words, done.stderr)
        assert "run" in first_line(done)
        assert str(process.pid) in done.stderr, "who holds it is named"
    assert snapshot(run) == before
    process.kill()
    process.communicate()
    for pid in [*everybody][1:]:
        os.kill(pid, signal.SIGCONT)
    assert gone(everybody)
    saved = max(int(path.stem[5:]) for path in run.glob("checkpoints/step_*.pth"))
    done = exp(*settings, "resume=auto", f"max_steps={saved + 1}", timeout=100)
    assert done.returncode == 0, done.stderr
    assert result(run)["status"] == "completed"
    assert result(run)["resumed_from"] is not None


def test_a_sweep_has_its_folder_alone(exp, start):
    """Two would lose each other's jobs, and a run in it would be one of them."""
    sweep = ["-m", *LONG, "seed=1,2", "sweep.parallel_jobs=1", "output_dir=sweep"]
    process = start(*sweep)
    wait_for(lambda: exp.path("sweep/0/metrics.jsonl").is_file(), process)
    before = {path.name for path in exp.path("sweep").iterdir()}
    for words in (sweep, [*sweep, "sweep.resume=true"], [*LONG, "output_dir=sweep"]):
        done = exp(*words)
        assert done.returncode == 2, (words, done.stdout)
        assert str(process.pid) in first_line(done)
    assert {path.name for path in exp.path("sweep").iterdir()} == before


@pytest.mark.extended
def test_a_container_that_is_killed_and_started_again_waits_for_its_own_lock(exp, python):
    """In a new space of process ids nothing tells that the holder is dead, but its silence."""
    container = ["unshare", "-rpf", "--mount-proc", "--kill-child", *python]
    if subprocess.run(["unshare", "-rpf", "--mount-proc", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine allows no namespaces")
    options = {"cwd": exp.folder, "env": clean_environment(), "stderr": subprocess.PIPE, "text": True}
    run = exp.path("run")
    first = subprocess.Popen([*container, *LONG, "checkpoint.every_steps=2", "output_dir=run"], **options)
    wait_for(has_steps(run, 3), first)
    held = subprocess.run([*container, *LONG, "output_dir=run", "resume=auto"], check=False, **options)
    assert held.returncode == 2  # the holder has shown a sign of life
    first.kill()
    first.communicate()
    silent = time.time() - 105  # of the two minutes that it would take
    os.utime(run / ".lock", (silent, silent))
    again = subprocess.Popen([*container, *LONG, "output_dir=run", "resume=auto", "max_steps=1"], **options)
    said = again.communicate(timeout=200)[1]
    assert again.returncode == 0, said
    assert said.startswith("warning: ")
