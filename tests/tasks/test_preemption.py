"""Notice to end: the state is saved between two steps, and the continued run is the run that would have been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TINY, Forked, clean_environment

STEPS = ["max_epochs=2", "max_steps=150", "log_every=10", "checkpoint.every_epochs=0"]


class Running:
    """``python -m exp`` in the background, in a session of its own."""

    def __init__(self, folder: Path, *arguments: str, fresh: bool = False) -> None:
        self.folder = folder / "run"
        words = [*TINY, *STEPS, "output_dir=run", *arguments]
        self.process: Any = (
            subprocess.Popen(
                [sys.executable, "-m", "exp", *words], cwd=folder, env=clean_environment(), stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, start_new_session=True,
            )
            if fresh
            else Forked(folder, *words, new_session=True)
        )  # fmt: skip

    def wait_for(self, condition) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def wait_for_steps(self) -> None:
        self.wait_for(lambda: '"train"' in self.text("metrics.jsonl"))

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.is_file() else ""

    def everything(self) -> list[int]:
        """All processes below, as far as they can be traced, and the parent."""
        parents = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def end(self) -> tuple[int, str]:
        output, errors = self.process.communicate(timeout=280)
        return self.process.returncode, output + errors

    def checkpoint(self) -> dict:
        (path,) = sorted(self.folder.glob("checkpoints/step_*.pth"))
        return torch.load(path)


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(*arguments: str, **options: bool) -> Running:
        started.append(Running(tmp_path, *arguments, **options))
        return started[-1]

    yield begin
    for running in started:
        for pid in running.everything():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        running.process.communicate()


def assert_same_weights(first: Path, second: Path) -> None:
    last = f"checkpoints/step_{150:08d}.pth"
    one, other = torch.load(first / last), torch.load(second / last)
    for name, weight in one["state_dict"].items():
        assert torch.equal(weight, other["state_dict"][name]), name


@pytest.mark.parametrize(("nproc", "loaders"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 0)])
def test_a_signal_to_every_process_saves_and_the_run_goes_on_exactly(exp, start, nproc, loaders):
    """Slurm sends its signal to every process of a job step: agent, workers and their loaders as well."""
    settings = [f"nproc={nproc}", f"data.num_workers={loaders}"]
    running = start(*settings)
    running.wait_for_steps()
    processes = running.everything()
    assert len(processes) > 2
    for pid in processes:
        os.kill(pid, signal.SIGUSR2)
    code, said = running.end()
    assert code == 75, said
    result = json.loads(running.text("result.json"))
    assert result["status"] == "preempted"
    assert 10 <= result["steps"] < 150
    assert f"preempted after step {result['steps']}" in said
    assert "resume=auto" in said
    assert "Error" not in running.text("logs/rank0.log")
    assert running.checkpoint()["meta"]["step"] == result["steps"]
    done = exp(*TINY, *STEPS, *settings, "output_dir=run", "resume=auto")
    assert done.returncode == 0, done.stderr
    exp.train("whole", *STEPS, *settings)
    assert exp.result("run")["resumed_from"].endswith(f"{result['steps']:08d}.pth")
    assert_same_weights(exp.path("run"), exp.path("whole"))
    assert exp.result("run")["metrics"] == exp.result("whole")["metrics"]


@pytest.mark.slow
def test_a_validation_that_was_cut_short_is_made_first(exp, start):
    settings = ["val_every=20", "data.eval_batch_size=1", "max_steps=40"]  # thousands of batches of one window each
    running = start(*settings)
    running.wait_for(lambda: '"step": 20' in running.text("metrics.jsonl"))
    time.sleep(0.1)
    os.kill(running.process.pid, signal.SIGUSR2)
    code, said = running.end()
    assert code == 75, said
    meta = running.checkpoint()["meta"]
    assert (meta["step"], meta["validation_due"]) == (20, True)
    settings[1] = "data.eval_batch_size=128"
    assert exp(*TINY, *STEPS, *settings, "output_dir=run", "resume=auto").returncode == 0
    records = [json.loads(line) for line in running.text("metrics.jsonl").splitlines()]
    assert [record["step"] for record in records if record["split"] == "val"] == [20, 40]


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_second_signal_ends_at_once(start, nproc):
    running = start(f"nproc={nproc}", fresh=True)
    running.wait_for(lambda: (running.folder / "config.yaml").is_file())
    # Nobody looks for notice yet: torch is still being imported.
    log = "rank0.log" if nproc == 1 else "agent.log"
    running.wait_for(lambda: (running.folder / "logs" / log).is_file())
    deadline = time.monotonic() + 240
    while running.process.poll() is None:  # two that come while a library is being loaded count as one
        assert time.monotonic() < deadline
        os.kill(running.process.pid, signal.SIGUSR2)
        time.sleep(0.3)
    code, said = running.end()
    assert code == 128 + signal.SIGUSR2, said
    assert "interrupted by SIGUSR2" in said
    assert running.everything() == [running.process.pid]


@pytest.mark.slow
def test_a_task_without_state_ends_at_once(exp, start):
    exp.train("trained")
    running = start("task=eval", "init_from=trained", "nproc=2", "data.eval_batch_size=1")
    running.wait_for(lambda: (running.folder / "logs" / "rank1.log").is_file())
    time.sleep(1)
    os.kill(running.process.pid, signal.SIGUSR2)
    code, said = running.end()
    assert code == 75, said
    assert "run it again" in said
    assert json.loads(running.text("result.json"))["status"] == "preempted"
