"""Workers forked from one template that has imported everything: eight imports become one.

The template is the fork server of Python's multiprocessing: a process without threads, which touches no device. Torch's
elastic agent starts its workers through it (``start_method="forkserver"``).
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from exp.backends_registry import create_backend
from exp.config.names import allow
from exp.config.schema import DIAGNOSES
from exp.errors import EXIT_FAILED
from exp.launcher.base import SCRATCH_VARIABLE
from exp.launcher.processes import AGENT_VARIABLE, die_with_parent, is_alive
from exp.runfolder import RunFolder, read_json, write_json

__all__ = ["PRELOAD_VARIABLE", "START_METHOD", "recorded_exits", "start_template", "work"]

START_METHOD = "forkserver"
_EXIT = "exit-"
PRELOAD_VARIABLE = "EXP_PRELOAD"
"""Environment variable that tells the template which modules the run's model and data need."""


def start_template(folder: RunFolder, nproc: int, single_node: bool) -> bool:
    """Start the template, if the workers of a run can come from one; it imports while the agent does.

    What the backend wants in the environment of every worker is set here, before the template imports torch; what
    differs between workers they set themselves, as they would otherwise.

    Args:
        folder: the run folder; its configuration is read.
        nproc: workers on this node.
        single_node: whether the job stays on it.

    Returns:
        Whether it was started. Not for one worker, nor for a diagnosis, which must find out what goes wrong in each
        process, nor where the backend does not say that forking is safe.
    """
    config: Any = OmegaConf.load(folder.in_use(folder.config))
    allow(config.get("plugins") or [])
    if nproc == 1 or config.task.name in DIAGNOSES or not config.launcher.fork:
        return False
    backend = create_backend(config.backend)
    if not backend.forks_safely:
        return False
    first, *others = (backend.worker_env(rank, nproc, single_node) for rank in range(nproc))
    for name, value in first.items():
        if all(other.get(name) == value for other in others):
            os.environ.setdefault(name, value)
    targets = [str(config[part].get("_target_", "")).rpartition(".")[0] for part in ("model", "data")]
    # Modules of the user's are left to the workers: what they do while they load is not known to survive a fork.
    modules = [module for module in targets if module.startswith("exp.")]
    os.environ[PRELOAD_VARIABLE] = ",".join([*modules, f"exp.tasks.{config.task.name}"])
    multiprocessing.get_context(START_METHOD).set_forkserver_preload(["exp.launcher.preload"])
    forkserver.ensure_running()
    return True


def work(worker: str, run_dir: str) -> None:
    """What a process of torch's agent does: guard a worker that it forks, and end as that ends.

    Torch reports one failure only where functions are started, not the first one. The guard is the worker's parent: it
    knows when and of what it died, and leaves word (:func:`recorded_exits`).

    Args:
        worker: module whose ``main`` is the worker.
        run_dir: the run folder.
    """
    guard = os.getpid()
    pid = os.fork()
    if pid == 0:
        sys.argv = [worker, run_dir]
        importlib.import_module(worker).main(parent=guard)
    # The template ends with the agent, and the guard with the template.
    die_with_parent(signal.SIGKILL, os.getppid())
    if not is_alive(int(os.environ[AGENT_VARIABLE])):
        os.kill(pid, signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda number, _frame: os.kill(pid, number))
    _, status = os.waitpid(pid, 0)
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    if code == 0:
        return
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    exits = {"rank": rank, "local_rank": local_rank, "exit_code": code, "time": time.time()}
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    write_json(Path(os.environ[SCRATCH_VARIABLE], f"{_EXIT}{attempt}-{local_rank}.json"), exits)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(guard, -code)
    os._exit(code if code > 0 else EXIT_FAILED)


def recorded_exits(scratch: Path) -> list[dict[str, Any]]:
    """How workers of the last attempt ended that did not end well: rank, local rank, exit code and time."""
    files = [file.name[len(_EXIT) :].split("-")[0] for file in scratch.glob(f"{_EXIT}*.json")]
    last = max(map(int, files), default=0)
    return [read_json(file) for file in sorted(scratch.glob(f"{_EXIT}{last}-*.json"))]
