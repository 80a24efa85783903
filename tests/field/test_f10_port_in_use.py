"""F10: port 29500 was in use; two jobs on one machine collided.

With exp a job on one machine uses no port at all: its processes meet through files, and two jobs never collide. A fixed
port, as several nodes need it, is checked before anything starts.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tests.conftest import TINY, clean_environment


@pytest.fixture
def taken():
    """The port of another job."""
    with socket.socket() as other_job:
        other_job.bind(("127.0.0.1", 0))
        other_job.listen()
        yield other_job.getsockname()[1]


@pytest.mark.slow
def test_stock_job_fails_where_another_has_the_port(stock, taken):
    script = """
        import torch.distributed as dist
        dist.init_process_group("gloo")
    """
    (ended,) = stock(script, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken))
    assert ended.returncode == 1
    assert "address already in use" in ended.last.lower()


@pytest.mark.slow
def test_exp_runs_two_jobs_at_once(exp, taken):
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "exp", *TINY, "max_steps=2", "nproc=2", f"output_dir=job{number}"],
            cwd=exp.folder,
            env=clean_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    for job in jobs:
        _, errors = job.communicate(timeout=280)
        assert job.returncode == 0, errors
    assert exp.result("job1")["metrics"] == exp.result("job2")["metrics"]


@pytest.mark.slow
def test_exp_says_who_has_a_fixed_port(exp, taken):
    done = exp(*TINY, "launcher.nnodes=2", f"launcher.rdzv_endpoint=127.0.0.1:{taken}", "output_dir=run")
    assert done.returncode == 2
    first = done.stderr.splitlines()[0]
    assert f"port {taken} is taken by " in first
    assert f"(pid {os.getpid()}); choose another port" in first
