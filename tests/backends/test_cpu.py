from __future__ import annotations

import json
import os

import torch
from exp.backends.cpu import CpuBackend

from exp.engine import rng
from tests.conftest import TINY


def test_cores_are_shared_out(monkeypatch):
    backend = CpuBackend(name="cpu")
    cores = len(os.sched_getaffinity(0))
    assert backend.worker_env(0, 1, single_node=True)["OMP_NUM_THREADS"] == str(cores)
    assert backend.worker_env(0, 1000, single_node=True)["OMP_NUM_THREADS"] == "1"
    assert CpuBackend(name="cpu", env={"OMP_NUM_THREADS": "7"}).worker_env(0, 1, True)["OMP_NUM_THREADS"] == "7"


def test_precision():
    backend = CpuBackend(name="cpu")
    assert backend.supports("bf16")
    assert not backend.supports("fp16")
    with backend.autocast("bf16"):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16
    assert backend.grad_scaler("fp32") is None


def test_random_states_come_back():
    backend = CpuBackend(name="cpu")
    rng.seed_everything(3, backend)
    state = rng.rng_state(backend)
    first = torch.rand(3)
    rng.set_rng_state(state, backend)
    assert torch.equal(torch.rand(3), first)


def test_a_process_group_from_the_shell_is_honoured_and_recorded(exp):
    result = exp.train("run", "nproc=2", "backend.process_group=gloo")
    assert result["process_group"] == "gloo"
    done = exp(*TINY, "nproc=2", "output_dir=other", TORCH_DISTRIBUTED_BACKEND="mpi")
    assert done.returncode == 1
    assert "mpi" in done.stderr.splitlines()[0].lower()


def test_the_run_records_what_it_ran_on(exp):
    exp.train("run")
    environment = json.loads((exp.path("run") / "env.json").read_text())
    assert environment["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert environment["devices"][0]["name"]
    assert "OMP_NUM_THREADS" in environment["backend_env"]
