"""Nodes that come and go: the others go on from the newest checkpoint, with the losses of an undisturbed run."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.behaviour.conftest import FORECAST, family, first_line, has_steps, losses, ran, result, wait_for
from tests.conftest import free_port
from tests.simulators import needs_current_card, needs_legacy_card

SLOW = """
import pathlib, time
from mmengine.hooks import Hook

class Slow(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if not pathlib.Path("fast").exists():
            time.sleep(0.5)
"""
JOB = [*FORECAST, "dropout_by_sample=true", "max_steps=200", "val_every=9", "checkpoint.every_steps=5"]


@pytest.fixture
def node(start):
    """Starts a node of a job with 2 to 4 nodes."""
    job = [*JOB, "plugins=[slow]", "hooks=[{type: slow.Slow}]", "output_dir=run", "resume=auto",
           "launcher.nnodes=2:4", f"launcher.rdzv_endpoint=127.0.0.1:{free_port()}"]  # fmt: skip
    return lambda *words: start(*job, *words, OMP_NUM_THREADS="1")


@pytest.mark.extended
@needs_current_card
def test_nodes_come_leave_with_notice_and_die_and_the_losses_are_those_of_one_process(exp, node):
    (exp.folder / "slow.py").write_text(SLOW)
    run, log = exp.path("run"), exp.path("run") / "logs" / "rank0.log"
    begin = re.compile(r" rank 0/(\d+) |: resume(?:=auto: no checkpoint|: from .* after step (\d+))")

    def trains(rounds, ranks, *nodes):
        """Until so many rounds have begun, the last with so many ranks; returns the step from which it has resumed."""
        wait_for(lambda: log.is_file() and len(begin.findall(log.read_text())) == 2 * rounds, *nodes)
        (told, _), (_, resumed) = begin.findall(log.read_text())[-2:]
        assert int(told) == ranks
        wait_for(has_steps(run, int(resumed or 0) + 3), *nodes)
        return int(resumed or 0)

    host = node()
    wait_for(lambda: list(run.glob("logs/agent-*")), host)  # it serves the store
    second = node()
    trains(1, 2, host, second)
    third = node()
    trains(2, 3, host, second, third)
    second.send_signal(signal.SIGUSR2)
    said = second.communicate(timeout=120)
    assert second.returncode == 75, said
    assert "this node has left after step" in said[0]
    trains(3, 2, host, third)
    second = node()
    trains(4, 3, host, second, third)
    before = max(losses(run))
    for pid in family(third.pid):
        os.kill(pid, signal.SIGKILL)
    assert trains(5, 2, host, second) >= before - 5  # checkpoint.every_steps
    (exp.folder / "fast").touch()
    said = [process.communicate(timeout=120) for process in (host, second)]
    assert [host.returncode, second.returncode] == [0, 0], said
    ran(exp, *JOB, "output_dir=one")
    assert losses(run) == pytest.approx(losses(exp.path("one")), rel=1e-5)
    assert len(losses(run)) == 200
    assert result(run)["metrics"] == pytest.approx(result(exp.path("one"))["metrics"], rel=1e-5)


RANGE = ["backend=cpu", "launcher.nnodes=2:4", "launcher.rdzv_endpoint=127.0.0.1:1", "output_dir=run"]


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["launcher.nnodes=4:2"], 2, "launcher.nnodes=4:2"),
        (["launcher.share=1"], 2, "share"),
        (["task=doctor"], 2, "task=doctor"),
        pytest.param(["launcher=submitit", "launcher.cluster=debug"], 2, "launcher=submitit", marks=needs_current_card),
        pytest.param(["batch_size=8"], 2, "global_batch_size", marks=needs_current_card),
        pytest.param([], 3, "torch 2.1", marks=[needs_legacy_card, pytest.mark.legacy]),
    ],
)
def test_what_nodes_that_come_and_go_cannot_do_is_refused_by_name(exp, words, code, named):
    done = exp(*RANGE, *words)
    assert done.returncode == code, done.stderr
    assert named in first_line(done)


@needs_current_card
def test_too_few_nodes_end_with_their_number(exp, node):
    (exp.folder / "slow.py").write_text(SLOW)
    alone = node("launcher.timeout_s=3")
    said = alone.communicate(timeout=120)
    assert alone.returncode == 1, said
    assert "waiting for 2 to 4 nodes" in said[0]
    assert "fewer than 2 nodes" in said[1]
