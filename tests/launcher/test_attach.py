"""A submitted job that nobody follows any more is followed again, and never has a second one beside it."""

from __future__ import annotations

import json

from exp.runs.lock import LOCK
from tests.behaviour.conftest import TINY, first_line, has_steps, wait_for

MODEL = """
import os, time
from exp.forecasting.timebridge import TimeBridge

class Slow(TimeBridge):
    steps = 0
    def losses(self, *batch):
        self.steps += 1
        while self.steps == 3 and not os.path.exists("go"):
            time.sleep(0.05)
        return super().losses(*batch)
"""
TRAIN = [*TINY, "model._target_=slow.Slow", "log_every=1", "output_dir=run"]
SUBMIT = [*TRAIN, "launcher=submitit", "launcher.cluster=local", "launcher.poll_s=0.2"]


def test_the_same_command_follows_the_job_that_is_there(exp, start):
    (exp.folder / "slow.py").write_text(MODEL)
    run = exp.path("run")
    follower = start(*SUBMIT)
    wait_for(has_steps(run), follower)
    follower.kill()
    follower.communicate()
    holder = json.loads((run / LOCK).read_text())
    assert holder["cluster"] == "local"
    for words, named in (([*SUBMIT, "seed=7"], "task=attach run=run"), (TRAIN, "in use by another run: host ")):
        refused = exp(*words)
        assert (refused.returncode, named in first_line(refused)) == (2, True), refused.stderr

    again = start(*SUBMIT)
    following = f"following process {holder['job']} of run"
    printed = again._files[0]
    wait_for(lambda: printed.exists() and following in printed.read_text(), again)
    (exp.folder / "go").touch()
    said = again.communicate(timeout=120)
    assert (again.returncode, "MSE" in said[0]) == (0, True), said
    assert len(exp.losses("run")) == 4
    assert json.loads((run / "logs" / "job.json").read_text())["holder"]["job"] == holder["job"]
    assert not (run / LOCK).exists()
    ended = exp("task=attach", "run=run")
    assert (ended.returncode, "MSE" in ended.stdout) == (0, True), ended.stderr
