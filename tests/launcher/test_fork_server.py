"""Workers come from one process that has imported everything, where the backend says that this is safe."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.conftest import TINY

BACKEND = """
import multiprocessing, os, signal
from pathlib import Path
from exp.backends.cpu import CpuBackend

def BACKEND(x):
    return x

class Mine(CpuBackend):
    forks_safely = {safe}
    loads_plugins = {plugins}

    def worker_env(self, local_rank, local_world_size, single_node):
        own = {{"FOR_ALL": "same", "PYTORCH_JIT": "0", "FOR_ONE": str(local_rank)}}
        return {{**own, **super().worker_env(local_rank, local_world_size, single_node)}}

    def set_device(self, local_rank):
        import torch
        parent = Path(f"/proc/{{os.getppid()}}/cmdline").read_bytes().decode()
        ways = {{"exp.launcher.agent": "of the agent", "forkserver": "of its own", "exp.worker": "started"}}
        how = next(way for name, way in ways.items() if name in parent)
        early = "early" if torch.jit.script(BACKEND) is BACKEND else "late"
        Path(f"seen{{local_rank}}").write_text(f"{{how}} {{early}} {{os.environ['FOR_ALL']}} {{os.environ['FOR_ONE']}}")
        multiprocessing.get_context("spawn").Semaphore()  # has a name: Python's resource tracker has to hear of it
        agent = os.environ["EXP_AGENT_PID"]
        for number, name in ((os.getpid(), "worker"), (os.getppid(), "monitor"), (agent, "agent")):
            status = dict(line.split(":", 1) for line in Path(f"/proc/{{number}}/status").read_text().splitlines())
            Path(f"mask-{{name}}{{local_rank}}").write_text(status["SigBlk"].strip())
        if {kill} and local_rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        return super().set_device(local_rank)
"""


@pytest.fixture
def train(exp):
    def train(name, *settings, safe=True, plugins=False, kill=False):
        (exp.folder / "mine.py").write_text(BACKEND.format(safe=safe, plugins=plugins, kill=kill))
        for seen in exp.folder.glob("seen*"):
            seen.unlink()
        own = [setting for setting in TINY if setting != "backend=cpu"]
        settings = (*own, "backend=cpu", "backend._target_=mine.Mine", "nproc=2", f"output_dir={name}", *settings)
        return exp(*settings, fresh=True)

    return train


@pytest.mark.parametrize(
    ("safe", "plugins", "how"),
    [(True, False, "of the agent"), (True, True, "of its own"), (False, False, "started")],
)
def test_workers_are_forked_where_that_is_safe(exp, train, safe, plugins, how):
    """Of a process that the agent imports with, unless it would load a device's plug-in with that.

    What all ranks have in their environment is there before the template loads torch; a rank's own comes later.
    """
    done = train("run", "model.attention_dropout=0", safe=safe, plugins=plugins)
    assert done.returncode == 0, done.stderr
    seen = [(exp.folder / f"seen{rank}").read_text() for rank in (0, 1)]
    assert seen == [f"{how} early same 0", f"{how} early same 1"]
    reference = exp.train("alone", "model.attention_dropout=0")
    assert exp.result("run")["metrics"] == pytest.approx(reference["metrics"], rel=1e-5)


@pytest.mark.parametrize("fork", [True, False])
def test_signals_that_give_notice_stay_blocked_in_every_process(exp, train, fork):
    """Python's resource tracker unblocks SIGTERM in the process that starts it: scancel would then kill that one."""
    done = train("run", "launcher=submitit", "launcher.cluster=debug", f"launcher.fork={fork}")
    assert done.returncode == 0, done.stderr
    masks = {file.name: int(file.read_text(), 16) for file in exp.folder.glob("mask-*")}
    assert len(masks) == 6
    how = "of the agent early same" if fork else "started early same"
    assert [(exp.folder / f"seen{rank}").read_text() for rank in (0, 1)] == [f"{how} 0", f"{how} 1"]
    wanted = 1 << (signal.SIGTERM - 1) | 1 << (signal.SIGUSR2 - 1)
    assert {name: hex(mask) for name, mask in masks.items() if mask & wanted != wanted} == {}


def test_workers_do_not_outlive_their_template(exp, train):
    done = train("run", "launcher.max_restarts=1", kill=True)
    assert done.returncode not in (0, 75)
    assert done.stderr.startswith("error: rank ")
    assert [process for process in Path("/proc").glob("[0-9]*") if _works_in(process, exp.folder)] == []


def _works_in(process, folder):
    try:
        return (process / "cwd").resolve(strict=True) == folder
    except OSError:  # it has ended, or is a kernel's
        return False
