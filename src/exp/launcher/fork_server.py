"""Workers forked from one process that has imported everything: eight imports become one.

It is that of Python's multiprocessing: a process without threads, which touches no device. Torch's elastic agent starts
its workers through it (``start_method="forkserver"``), and imports torch itself meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from exp.config.resolve import allow
from exp.hardware.registry import create_backend
from exp.launcher.processes import start_resource_tracker
from exp.launcher.rank import SCRATCH_VARIABLE
from exp.runs.folder import RunFolder
from exp.sockets import keep_sockets_in
from exp.task import task_class

__all__ = ["PRELOAD_VARIABLE", "START_METHOD", "start_fork_server", "work"]

START_METHOD = "forkserver"
PRELOAD_VARIABLE = "EXP_PRELOAD"
"""Environment variable that tells the fork server which modules the run's model and data need."""


def start_fork_server(folder: RunFolder, nproc: int, single_node: bool) -> bool:
    """Start the fork server, if the workers of a run can come from one. No thread may have been started before.

    What the backend wants in the environment of every worker is set here, before the fork server imports torch; what
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
    task = task_class(config)
    if nproc == 1 or task.diagnoses or not config.launcher.fork:
        return False
    backend = create_backend(config.backend)
    # The fork server is reached by a socket.
    if not backend.capabilities.forking or not keep_sockets_in(os.environ[SCRATCH_VARIABLE]):
        return False
    first, *others = (backend.worker_env(rank, nproc, single_node) for rank in range(nproc))
    for name, value in first.items():
        if all(other.get(name) == value for other in others):
            os.environ.setdefault(name, value)
    targets = [str(config[part].get("_target_", "")).rpartition(".")[0] for part in ("model", "data")]
    # Modules of the user's are left to the workers: what they do while they load is not known to survive a fork.
    modules = [module for module in targets if module.startswith("exp.")]
    os.environ[PRELOAD_VARIABLE] = ",".join([*modules, *filter(None, [task.work.rpartition(".")[0]])])
    multiprocessing.get_context(START_METHOD).set_forkserver_preload(["exp.launcher.preload"])
    here = Path.cwd()
    # A new interpreter looks for modules in its current folder first; the workers go back to this one.
    os.chdir(os.environ[SCRATCH_VARIABLE])
    start_resource_tracker()  # or the fork server's start would start it, with signals let through
    forkserver.ensure_running()
    os.chdir(str(here))
    return True


def work(run_dir: str) -> None:
    """What a process of torch's agent does: it becomes a worker.

    Args:
        run_dir: the run folder.
    """
    from exp.launcher.worker import main

    sys.argv = ["exp.launcher.worker", run_dir]
    main(parent=os.getppid())  # the fork server, which ends with the agent
