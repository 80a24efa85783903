from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.behaviour.conftest import has_steps, python, start, wait_for
from tests.conftest import TINY
from tests.slurm.cluster import Cluster, why_not

__all__ = ["Submitted", "python", "start"]


@pytest.fixture(scope="session")
def one_cluster():
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(one_cluster, monkeypatch):
    for name, value in one_cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield one_cluster
    one_cluster.clear()


class Submitted:
    """``python -m exp launcher=submitit`` in the background."""

    def __init__(self, cluster: Cluster, process, run: Path) -> None:
        self.cluster, self.process, self.run = cluster, process, run

    def wait_for_steps(self) -> None:
        wait_for(has_steps(self.run), self.process)

    def wait_for_checkpoint(self) -> None:
        wait_for(lambda: any(self.run.glob("checkpoints/step_*.pth")), self.process)

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in self.run.glob("slurm/*.out"))

    def pid_of(self, name: str, node: str) -> int:
        """The process of the only job on a node that calls itself so, or has it in its command line."""
        marks = {f"SLURM_JOB_ID={self.job()}".encode(), f"SLURMD_NODENAME={node}".encode()}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                called = (entry / "comm").read_text().strip()
                # srun has the command line of what it starts.
                mine = called == name or (called != "srun" and name in (entry / "cmdline").read_text())
                if mine and marks <= set((entry / "environ").read_bytes().split(b"\0")):
                    return int(entry.name)
            except OSError:
                continue
        raise AssertionError(f"no {name}")

    def end(self, code: int = 0) -> str:
        """What was printed; the exit code has to be this one."""
        said = "".join(self.process.communicate(timeout=280))
        assert self.process.returncode == code, said + self.logs()
        return said

    def job(self) -> str:
        """The only job's id."""
        return re.findall(r"JobId=(\d+)", self.cluster.run("scontrol", "show", "job", "-o").stdout)[-1]


@pytest.fixture
def submit(cluster, start, tmp_path):
    def begin(*arguments: str, sweep: bool = False, small=TINY, **extra: str) -> Submitted:
        settings = [*small, "launcher=submitit", "launcher.poll_s=0.5", "output_dir=run", *arguments]
        return Submitted(cluster, start(*(["-m"] * sweep), *settings, **extra), tmp_path / "run")

    return begin


@pytest.fixture
def result(tmp_path):
    """The record of the run, or of a job of the sweep."""
    return lambda job="": json.loads((tmp_path / "run" / job / "result.json").read_text())
