"""Workers come from one process that has imported everything, where the backend says that this is safe."""

from __future__ import annotations

import json
import signal

import pytest

from tests.behaviour.conftest import STEADY, result

BACKEND = """
import json, multiprocessing, os, re
from pathlib import Path
from dataclasses import replace
from exp.backends.cpu import CpuBackend

def BACKEND(x):
    return x

class Mine(CpuBackend):
    capabilities = replace(CpuBackend.capabilities, forking="safe" in os.environ["MINE"])

    def worker_env(self, local_rank, local_world_size, single_node):
        own = {"FOR_ALL": "same", "PYTORCH_JIT": "0", "FOR_ONE": str(local_rank)}
        if "plugins" in os.environ["MINE"]:
            own["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
        return {**own, **super().worker_env(local_rank, local_world_size, single_node)}

    def set_device(self, local_rank):
        import torch
        started = Path("/proc/self/cmdline").read_text()
        how = next(name for name in ("forkserver", "exp.worker.main") if name in started)
        early = torch.jit.script(BACKEND) is BACKEND
        multiprocessing.get_context("spawn").Semaphore()  # has a name: Python's resource tracker has to hear of it
        family = (os.getpid(), os.getppid(), os.environ["EXP_AGENT_PID"])
        blocked = [re.search(r"SigBlk:\\s(\\w+)", Path(f"/proc/{pid}/status").read_text())[1] for pid in family]
        hidden = "CUDA_VISIBLE_DEVICES=" in Path(f"/proc/{os.getppid()}/environ").read_text().split("\\0")
        early = early and (hidden or how != "forkserver")
        place = [how, early, os.environ["FOR_ALL"], os.environ["FOR_ONE"]]
        Path(f"seen{local_rank}").write_text(json.dumps([place, blocked]))
        return super().set_device(local_rank)
"""
NOTICE = 1 << (signal.SIGTERM - 1) | 1 << (signal.SIGUSR2 - 1)


@pytest.mark.parametrize(("mine", "parent"), [("safe, and loads plugins", "forkserver"), ("", "exp.worker.main")])
def test_workers_are_forked_where_that_is_safe(exp, trained, mine, parent):
    """What all ranks have in common is set before torch loads, and CUDA is hidden.

    Signals that give notice stay blocked in every process. Python's resource tracker unblocks SIGTERM in the process
    that starts it: scancel would then kill that one.
    """
    (exp.folder / "mine.py").write_text(BACKEND)
    where = ["nproc=2", "launcher=submitit", "launcher.cluster=debug", "output_dir=run"]
    done = exp(*STEADY, "backend._target_=mine.Mine", *where, fresh=True, MINE=mine, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        place, blocked = json.loads((exp.folder / f"seen{rank}").read_text())
        assert place == [parent, True, "same", str(rank)]
        assert [int(mask, 16) & NOTICE for mask in blocked] == [NOTICE] * 3, "of worker, its parent, agent"
    assert exp.result("run")["metrics"] == pytest.approx(result(trained("steady"))["metrics"], rel=1e-5)
