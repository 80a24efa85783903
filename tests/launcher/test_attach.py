"""A submitted job that nobody follows any more is followed again, and never has a second one beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from exp.lock_holder import LOCK
from tests.conftest import TINY, clean_environment, run_exp

MODEL = """
import os, time
from exp.forecasting.timebridge import TimeBridge


class Model(TimeBridge):
    '''Waits in its third step for a file.'''

    steps = 0

    def losses(self, *batch):
        self.steps += 1
        while self.steps == 3 and not os.path.exists('go'):
            time.sleep(0.05)
        return super().losses(*batch)
"""
COMMAND = [
    *TINY, "model._target_=slow.Model", "launcher=submitit", "launcher.cluster=local", "launcher.poll_s=0.2",
    "log_every=1", "output_dir=run",
]  # fmt: skip


def wait_for(condition, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_same_command_follows_the_job_that_is_there(tmp_path):
    (tmp_path / "slow.py").write_text(MODEL)
    run = tmp_path / "run"
    follower = subprocess.Popen(
        [sys.executable, "-m", "exp", *COMMAND], cwd=tmp_path, env=clean_environment(), stdout=subprocess.DEVNULL
    )
    try:
        wait_for((run / "metrics.jsonl").is_file)
    finally:
        os.kill(follower.pid, signal.SIGKILL)
        follower.wait()
    holder = json.loads((run / LOCK).read_text())
    assert holder["cluster"] == "local"

    other = run_exp(tmp_path, *COMMAND, "seed=7")
    assert other.returncode == 2
    assert "task=attach run=run" in other.stderr.splitlines()[0], other.stderr
    refused = run_exp(tmp_path, *[each for each in COMMAND if "launcher" not in each])
    assert (refused.returncode, "run is in use by another run: host " in refused.stderr) == (2, True), refused.stderr

    def go() -> None:
        (tmp_path / "go").touch()

    again = subprocess.Popen(
        [sys.executable, "-m", "exp", *COMMAND], cwd=tmp_path, env=clean_environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said = again.stdout.readline()
    go()
    said += again.communicate(timeout=120)[0]
    assert again.returncode == 0, said
    assert f"following process {holder['job']} of run" in said
    assert "MSE" in said
    steps = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"train"' in line]
    assert len(steps) == 4
    assert len(list((run / "slurm").glob("*_submitted.pkl"))) == 1
    assert not (run / LOCK).exists()

    ended = run_exp(tmp_path, "task=attach", "run=run")
    assert (ended.returncode, "MSE" in ended.stdout) == (0, True), ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "needs run="), (["run=nowhere"], "holds no submitted job"), (["run=[a,b]"], "needs run=")],
)
def test_what_cannot_be_followed(exp, arguments, words):
    done = exp("task=attach", *arguments)
    assert (done.returncode, words in done.stderr.splitlines()[0]) == (2, True), done.stderr
    assert list(exp.folder.iterdir()) == []
