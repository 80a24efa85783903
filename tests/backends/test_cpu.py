from __future__ import annotations

from exp.backends.cpu import CpuBackend

from exp.cores import usable_cores

CORES = usable_cores()


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
