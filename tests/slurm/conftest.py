from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import TINY, Forked
from tests.slurm.cluster import Cluster, why_not


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
def cluster(one_cluster):
    yield one_cluster
    one_cluster.clear()


class Submitted:
    """``python -m exp launcher=submitit`` in the background."""

    def __init__(self, cluster: Cluster, folder: Path, *arguments: str, **extra: str) -> None:
        self.cluster, self.place = cluster, folder
        self.process = Forked(folder, *arguments, new_session=True, **cluster.environment, **extra)

    def wait_for(self, condition, seconds: float = 280) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def wait_for_steps(self, run: str = "run") -> None:
        metrics = self.place / run / "metrics.jsonl"
        self.wait_for(lambda: metrics.is_file() and '"train"' in metrics.read_text())

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in self.place.glob("**/slurm/*.out"))

    def process_of(self, name: str, node: str = "") -> int:
        """Pid of the process of the only job that calls itself so, or has it in its command line."""
        marks = {f"SLURM_JOB_ID={self.job()}".encode(), *([f"SLURMD_NODENAME={node}".encode()] if node else [])}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if not marks <= set((entry / "environ").read_bytes().split(b"\0")):
                    continue
                called = (entry / "comm").read_text().strip()
                # srun has the command line of what it starts.
                if called == name or (called != "srun" and name in (entry / "cmdline").read_text()):
                    return int(entry.name)
            except OSError:
                continue
        raise AssertionError(f"no {name}")

    def end(self, seconds: float = 280) -> tuple[int, str]:
        """Exit code, and what was printed."""
        output, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, output + errors

    def job(self) -> str:
        """The only job's id."""
        return re.findall(r"JobId=(\d+)", self.cluster.run("scontrol", "show", "job", "-o").stdout)[-1]


@pytest.fixture
def submit(cluster, tmp_path):
    started = []

    def begin(*arguments: str, run: str = "run", sweep: bool = False, small=TINY, **extra: str) -> Submitted:
        settings = [*small, "launcher=submitit", "launcher.poll_s=0.5", f"output_dir={run}", *arguments]
        started.append(Submitted(cluster, tmp_path, *(["-m"] * sweep), *settings, **extra))
        return started[-1]

    yield begin
    for submitted in started:
        if submitted.process.poll() is None:
            os.kill(submitted.process.pid, signal.SIGKILL)
        submitted.process.communicate()


@pytest.fixture
def result(tmp_path):
    return lambda name: json.loads((tmp_path / name / "result.json").read_text())
