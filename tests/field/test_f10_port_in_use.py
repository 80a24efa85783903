"""F10: port 29500 was in use; two jobs on one machine collided.

With exp a job on one machine uses no port at all: its processes meet through files, and two jobs never collide. A fixed
port, as several nodes need it, is checked before anything starts.
"""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.conftest import TINY, clean_environment


def test_stock_jobs_collide(stock):
    script = """
        import os, torch.distributed as dist
        dist.init_process_group("gloo")
    """
    with socket.socket() as other_job:
        other_job.bind(("127.0.0.1", 0))
        other_job.listen()
        port = str(other_job.getsockname()[1])
        (ended,) = stock(script, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert ended.returncode == 1
    assert "ddress already in use" in ended.printed or "EADDRINUSE" in ended.printed


def test_exp_runs_two_jobs_at_once(exp):
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "exp", *TINY, "nproc=2", f"output_dir=job{number}"],
            cwd=exp.folder,
            env=clean_environment(MASTER_PORT="29500"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    for job in jobs:
        _, errors = job.communicate(timeout=120)
        assert job.returncode == 0, errors
    assert exp.result("job1")["metrics"] == exp.result("job2")["metrics"]


def test_exp_says_that_a_fixed_port_is_taken(exp):
    with socket.socket() as other_job:
        other_job.bind(("127.0.0.1", 0))
        other_job.listen()
        port = other_job.getsockname()[1]
        done = exp(
            *TINY, "launcher.nnodes=2", f"launcher.rdzv_endpoint=127.0.0.1:{port}", "launcher.timeout_s=5",
            "output_dir=run",
        )  # fmt: skip
    assert done.returncode == 2
    assert str(port) in done.stderr.splitlines()[0]
