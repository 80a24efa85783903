"""Workers forked from one process that has imported everything: eight imports become one.

It is that of Python's multiprocessing: a process without threads, which touches no device. Torch's elastic agent starts
its workers through it (``start_method="forkserver"``). The agent needs torch, too; where nothing of a device's loads
with that, the fork server is itself forked from the agent, and nine imports become one.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from exp.backends_registry import create_backend
from exp.config.names import allow
from exp.launcher.processes import name_process, start_resource_tracker
from exp.launcher.rank import SCRATCH_VARIABLE
from exp.runfolder import RunFolder
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
    if not backend.forks_safely:
        return False
    first, *others = (backend.worker_env(rank, nproc, single_node) for rank in range(nproc))
    for name, value in first.items():
        if all(other.get(name) == value for other in others):
            os.environ.setdefault(name, value)
    targets = [str(config[part].get("_target_", "")).rpartition(".")[0] for part in ("model", "data")]
    # Modules of the user's are left to the workers: what they do while they load is not known to survive a fork.
    modules = [module for module in targets if module.startswith("exp.")]
    os.environ[PRELOAD_VARIABLE] = ",".join([*modules, *task.modules])
    multiprocessing.get_context(START_METHOD).set_forkserver_preload(["exp.launcher.preload"])
    if not keep_sockets_in(os.environ[SCRATCH_VARIABLE]):
        return False  # the fork server is reached by a socket
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0" and _can_be_forked():
        importlib.import_module("exp.launcher.preload")
        _fork_server()
        start_resource_tracker()
    else:  # it imports while the agent does
        start_resource_tracker()  # or the fork server's start would start it, with signals let through
        forkserver.ensure_running()
    return True


def _can_be_forked() -> bool:
    """Whether multiprocessing's fork server is of the kind that :func:`_fork_server` knows: later ones want a key."""
    wanted = {"_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid"}
    parameters = list(inspect.signature(forkserver.main).parameters)
    known = ["listener_fd", "alive_r", "preload", "main_path", "sys_path"]
    return parameters == known and wanted <= vars(forkserver._forkserver).keys()


def _fork_server() -> None:
    """Do as ``forkserver.ensure_running``, but for the start of a new interpreter, which would import all this anew."""
    server: Any = forkserver._forkserver
    address = tempfile.mktemp(prefix="listener-", dir=os.environ[SCRATCH_VARIABLE])  # noqa: S306 - ours alone
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    Path(address).chmod(0o600)
    listener.listen()
    # All clients hold the writing end; when the last of them has ended, the server ends.
    alive_r, alive_w = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(alive_w)
            name_process("exp-template")
            forkserver.main(listener.detach(), alive_r, [])
        except SystemExit:
            code = 0
        except BaseException:  # noqa: BLE001 - nothing of the agent's is to go on here
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(alive_r)
    listener.close()
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_w, pid


def work(worker: str, run_dir: str) -> None:
    """What a process of torch's agent does: it becomes a worker.

    Args:
        worker: module whose ``main`` is the worker.
        run_dir: the run folder.
    """
    sys.argv = [worker, run_dir]
    # The fork server, this process's parent, ends with the agent.
    importlib.import_module(worker).main(parent=os.getppid())
