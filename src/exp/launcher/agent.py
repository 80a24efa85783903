"""The agent process: torch's elastic agent around the workers of one node. Run as ``python -m exp.launcher.agent``.

Where that is safe, the workers are forked from one process that has imported everything (:mod:`exp.launcher.preload`):
eight imports become one. It is that of Python's multiprocessing: a process without threads, which touches no device.
Torch's agent starts its workers through it (``start_method="forkserver"``), and imports torch itself meanwhile.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Mapping

from omegaconf import OmegaConf

from exp.config.resolve import allow
from exp.hardware.registry import create_backend
from exp.launcher.outcome import TERM_PATIENCE_S, Failures
from exp.launcher.ports import address_towards
from exp.launcher.processes import (
    AGENT_VARIABLE,
    JOB_VARIABLE,
    PRELOAD_VARIABLE,
    kill_job,
    name_process,
    start_resource_tracker,
)
from exp.launcher.rank import SCRATCH_VARIABLE
from exp.runs.folder import RunFolder
from exp.sockets import keep_sockets_in
from exp.task import task_class

__all__ = ["main", "work"]

logger = logging.getLogger(__name__)

_START_METHOD = "forkserver"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def main() -> int:
    """Run the launch spec in ``sys.argv[1]`` (JSON, of the torchrun launcher); returns 0 where all went well."""
    gc.disable()  # a fifth of the time that importing torch takes, and later there is next to nothing to collect
    spec: dict[str, Any] = json.loads(sys.argv[1])
    folder, scratch = RunFolder(spec["run_dir"]), os.environ[SCRATCH_VARIABLE]
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    name_process("exp-agent")
    forked = _start_fork_server(folder, spec["nproc"], single_node=spec["nnodes"] == 1)
    # What workers must not have from here comes after the fork.
    watcher = _watch_parent(spec["parent"], scratch)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent %(levelname)s %(message)s")
    # Torch keeps its own logs for ever, in a new folder for each job; ours are in the run folder.
    tempfile.tempdir = scratch
    autoload = os.environ.get(_AUTOLOAD)
    os.environ[_AUTOLOAD] = "0"  # this process touches no device, and a device's plug-in may fail to load
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    del os.environ[_AUTOLOAD]
    if autoload is not None:
        os.environ[_AUTOLOAD] = autoload
    ends: Mapping[int, Any] | None = {}
    try:
        if forked:
            elastic_launch(_launch_config(spec), work)(spec["run_dir"])
        else:
            elastic_launch(_launch_config(spec), sys.executable)("-m", "exp.launcher.worker", spec["run_dir"])
    except ChildFailedError as error:
        ends = error.failures
    except Exception:  # whatever torch's agent raises: the launcher shows the end of this log
        logger.exception("the agent failed")
        ends = None
    succeeded = ends is not None and Failures(folder, scratch).judge(ends)
    gc.collect()  # objects of multiprocessing remove their semaphores when they go
    if os.getppid() != spec["parent"]:
        watcher.join()  # the parent is dead, and the thread at work: it ends this process when nothing is left
    return 0 if succeeded else 1


def work(run_dir: str) -> None:
    """What a process of torch's agent does: it becomes a worker.

    Args:
        run_dir: the run folder.
    """
    from exp.launcher.worker import main

    sys.argv = ["exp.launcher.worker", run_dir]
    main(parent=os.getppid())  # the fork server, which ends with the agent


def _start_fork_server(folder: RunFolder, nproc: int, single_node: bool) -> bool:
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
    if nproc == 1 or task.diagnoses:
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
    multiprocessing.get_context(_START_METHOD).set_forkserver_preload(["exp.launcher.preload"])
    here = Path.cwd()
    # A new interpreter looks for modules in its current folder first; the workers go back to this one.
    os.chdir(os.environ[SCRATCH_VARIABLE])
    start_resource_tracker()  # or the fork server's start would start it, with signals let through
    forkserver.ensure_running()
    os.chdir(str(here))
    return True


def _watch_parent(parent: int, scratch: str) -> threading.Thread:
    """End the whole job when the parent dies without having ended it, of SIGKILL for instance.

    A thread, not a signal: torch's agent takes the signals, and waits half a minute for a worker that ignores them.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        kill_job(os.environ[JOB_VARIABLE])
        deadline = time.monotonic() + 2
        while os.path.exists(scratch) and time.monotonic() < deadline:  # noqa: PTH110
            shutil.rmtree(scratch, ignore_errors=True)  # torch's agent, in the main thread, may still write there
        os._exit(1)

    thread = threading.Thread(target=watch, name="watch-parent", daemon=True)
    thread.start()
    return thread


def _launch_config(spec: dict[str, Any]) -> Any:
    """The agent's settings; torch 1.10 does not know all of them."""
    from torch.distributed.launcher.api import LaunchConfig

    timeout_s: int = spec["timeout_s"]
    address: str | None = "127.0.0.1"
    # On one node the agent is alone, with a file in the private folder of the job.
    rendezvous, configs = "c10d", {"store_type": "file", "timeout": timeout_s}
    if spec["nnodes"] > 1:
        from exp.launcher.rendezvous import RENDEZVOUS

        # Nodes may come at any time within the time-out; without this, torch gives up after its own minute.
        configs = {"timeout": timeout_s, "join_timeout": timeout_s, "read_timeout": min(timeout_s, 60)}
        rendezvous, address = RENDEZVOUS, address_towards(spec["rdzv_endpoint"])
    settings: dict[str, Any] = {
        "min_nodes": spec["nnodes"],
        "max_nodes": spec["nnodes"],
        "nproc_per_node": spec["nproc"],
        "run_id": spec["rdzv_id"],
        "rdzv_backend": rendezvous,
        "rdzv_endpoint": spec["rdzv_endpoint"],
        "rdzv_configs": configs,
        "max_restarts": spec["max_restarts"],
        "monitor_interval": 0.1,
        "shutdown_timeout": TERM_PATIENCE_S,
        "start_method": _START_METHOD,
        "local_addr": address,
    }
    known = inspect.signature(LaunchConfig).parameters
    return LaunchConfig(**{name: value for name, value in settings.items() if name in known})


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads of torch's rendezvous may still be waiting; nothing else matters.
    os._exit(code)
