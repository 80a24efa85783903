from __future__ import annotations

import json

import pytest
import torch
from exp.backends.cpu import CpuBackend

from exp.cores import usable_cores
from exp.engine import rng

CORES = usable_cores()


def test_cores_are_shared_out(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    backend = CpuBackend(name="cpu")
    assert backend.worker_env(0, 1, single_node=True) == {
        "OMP_NUM_THREADS": str(CORES),
        "MKL_NUM_THREADS": str(CORES),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    assert backend.worker_env(0, 1000, single_node=True)["OMP_NUM_THREADS"] == "1"


def test_mkl_gets_as_many_threads_as_the_user_gives_to_openmp(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    configured = CpuBackend(name="cpu", env={"OMP_NUM_THREADS": "7"})
    environment = configured.worker_env(0, 1, True)
    assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("7", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert configured.worker_env(0, 1, True)["MKL_NUM_THREADS"] == "5"
    both = CpuBackend(name="cpu", env={"MKL_NUM_THREADS": "3"})
    assert both.worker_env(0, 1, True)["MKL_NUM_THREADS"] == "3"


def test_threads_apply_though_torch_was_imported_before(ranks):
    script = """
        import os, torch
        torch.set_num_threads(3)
        os.environ["OMP_NUM_THREADS"] = "2"
        device = backend.set_device(0)
        print(json.dumps([torch.get_num_threads(), str(device), backend.ddp_kwargs(device)]))
    """
    assert ranks(script) == [[2, "cpu", {}]]


def test_precision():
    backend = CpuBackend(name="cpu")
    assert backend.supports("bf16")
    assert not backend.supports("fp16")
    with backend.autocast("bf16"):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16
    with backend.autocast("fp32"):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32
    assert backend.grad_scaler("bf16") is None


def test_random_states_come_back():
    backend = CpuBackend(name="cpu")
    rng.seed_everything(3, backend)
    state = rng.rng_state(backend)
    first = torch.rand(3)
    rng.set_rng_state(state, backend)
    assert torch.equal(torch.rand(3), first)


def test_two_processes_meet(ranks):
    script = """
        import torch
        distributed = join()
        total = distributed.sum(torch.tensor([rank + 1.0])).item()
        told = distributed.gather(rank)
        backend.destroy_process_group()
        print(json.dumps([backend.process_group, total, told, torch.distributed.is_initialized()]))
    """
    assert ranks(script, world_size=2) == [["gloo", 3.0, [0, 1], False]] * 2


def test_a_process_group_from_the_shell_is_honoured_unless_the_config_names_one(ranks):
    script = """
        from exp.backends.cpu import CpuBackend
        try:
            join()
        except Exception as error:
            print(json.dumps([backend.process_group, str(error), CpuBackend("cpu", "gloo").process_group]))
    """
    asked, complaint, configured = ranks(script, TORCH_DISTRIBUTED_BACKEND="mpi")[0]
    assert asked == "mpi"
    assert "MPI" in complaint  # torch was really asked for it; its wheels have none
    assert configured == "gloo"


@pytest.mark.slow
def test_the_run_records_what_it_ran_on(exp):
    result = exp.train("run", "nproc=2", "backend.process_group=gloo")
    assert result["process_group"] == "gloo"
    environment = json.loads((exp.path("run") / "env.json").read_text())
    assert environment["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert environment["devices"][0]["name"]
    assert environment["devices"][0]["cores"] == CORES
    assert environment["backend_env"]["OMP_NUM_THREADS"] == "1"  # what this test exports, not the cores
