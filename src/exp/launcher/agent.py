"""The agent process: torch's elastic agent around the workers of one node. Run as ``python -m exp.launcher.agent``.

If the backend allows it, the workers are forked from one process that has imported everything
(:mod:`exp.worker.preload`), so that eight imports become one. This process is the fork server of Python's
multiprocessing: it has no threads and touches no device. Torch's agent starts its workers through it
(``start_method="forkserver"``), and imports torch in the meantime.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Mapping

from omegaconf import OmegaConf

from exp.config.resolve import trust_packages
from exp.hardware.ports import local_address_for
from exp.hardware.registry import create_backend
from exp.runs.failures import Failures, Patience
from exp.runs.folder import RunFolder
from exp.runs.job import SCRATCH_VARIABLE, set_socket_folder, signal_name
from exp.task import task_class
from exp.worker import processes
from exp.worker.processes import AGENT_VARIABLE, PRELOAD_VARIABLE, START

__all__ = ["main", "work"]

logger = logging.getLogger(__name__)

_START_METHOD = "forkserver"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def main() -> int:
    """Run what the launcher has written to :data:`exp.worker.processes.SPEC`; return 0 on success, 1 on failure."""
    gc.disable()  # saves a fifth of the time to import torch; later there is next to nothing to collect
    scratch = os.environ[SCRATCH_VARIABLE]
    spec: dict[str, Any] = json.loads(Path(scratch, processes.SPEC).read_text(encoding="utf-8"))
    folder = RunFolder(spec["run_dir"])
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    processes.name_process("exp-agent")
    starts_once = spec["nproc"] == 1 and spec["min_nnodes"] is None
    forked = not starts_once and _start_fork_server(folder, spec["nproc"], single_node=spec["nnodes"] == 1)
    # Everything that the workers must not inherit comes after the fork server has started.
    watcher = processes.watch_parent(spec["parent"], scratch)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent %(levelname)s %(message)s")
    # Torch would keep its own logs forever, in a new folder for each job; exp's logs are in the run folder.
    tempfile.tempdir = scratch
    autoload = os.environ.get(_AUTOLOAD)
    os.environ[_AUTOLOAD] = "0"  # this process uses no device, and importing a device's plug-in may fail
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    del os.environ[_AUTOLOAD]
    if autoload is not None:
        os.environ[_AUTOLOAD] = autoload
    succeeded = False
    try:
        if forked:
            elastic_launch(_launch_config(spec), work)(spec["run_dir"])
        else:
            elastic_launch(_launch_config(spec), sys.executable)("-c", START, "exp.worker.main", spec["run_dir"])
        succeeded = True
    except ChildFailedError as error:
        _record_killed(Failures(folder, scratch), error.failures)
    except Exception:  # torch's agent may raise anything; the launcher shows the end of this log
        logger.exception("the agent failed")
    gc.collect()  # multiprocessing removes a semaphore when its object is collected
    if os.getppid() != spec["parent"]:
        watcher.join()  # the parent is dead: the thread kills the job, and then ends this process
    return 0 if succeeded else 1


def work(run_dir: str) -> None:
    """Run a worker and its guard: the function that torch's agent runs in a forked process.

    Args:
        run_dir: the run folder.
    """
    from exp.worker.main import main

    code = main(run_dir, forked=True)  # the fork server ends with the agent
    if code:
        os._exit(code)


def _record_killed(failures: Failures, ends: Mapping[int, Any]) -> None:
    """Record the end of workers whose guard did not: the guard, or the process that has forked all, was killed.

    Args:
        failures: error files that the guards have written.
        ends: torch's ``ProcessFailure`` of the guards that did not return 0, by rank.
    """
    ended_child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # of this process's own children
    if ended_child is not None and ended_child.si_code != os.CLD_EXITED:
        why = f"exp-fork-server, the parent of all workers on {socket.gethostname()}, was killed by "
        failures.record_lost(why + signal_name(ended_child.si_status))
    elif not failures.read():
        for rank, end in ends.items():
            if end.exitcode != -signal.SIGTERM:  # torch's own
                failures.record_end(rank, end.local_rank, end.exitcode)


def _start_fork_server(folder: RunFolder, nproc: int, single_node: bool) -> bool:
    """Start the fork server, if the workers of this run can be forked. No thread may have been started before.

    Environment variables that are the same for all workers are set here, before the fork server imports torch. The
    workers set the others themselves.

    Args:
        folder: the run folder; its configuration is read.
        nproc: workers on this node.
        single_node: whether all workers of the job are on this node.

    Returns:
        Whether it was started. It is not for a diagnosis (which must show what goes wrong in each process), or if the
        backend does not declare forking as safe.
    """
    config: Any = OmegaConf.load(folder.config_of_node())
    trust_packages(config.get("plugins") or [])
    task = task_class(config)
    if task.is_diagnostic:
        return False
    backend = create_backend(config.backend)
    # The fork server listens on a Unix socket in this folder.
    if not backend.capabilities.forking or not set_socket_folder(os.environ[SCRATCH_VARIABLE]):
        return False
    first, *others = (backend.worker_env(rank, nproc, single_node) for rank in range(nproc))
    for name, value in first.items():
        if all(other.get(name) == value for other in others):
            os.environ.setdefault(name, value)
    os.environ.update(backend.run_env(config.precision, task.counts_fallbacks))
    targets = [str(config[part].get("_target_", "")).rpartition(".")[0] for part in ("model", "data")]
    # Users' modules are left to the workers: what they do at import may not survive a fork.
    modules = [module for module in targets if module.startswith("exp.")]
    os.environ[PRELOAD_VARIABLE] = ",".join(modules)
    multiprocessing.get_context(_START_METHOD).set_forkserver_preload(["exp.worker.preload"])
    here = Path.cwd()
    # A new interpreter looks for modules in the current folder first. The workers change back to this folder.
    os.chdir(os.environ[SCRATCH_VARIABLE])
    processes.start_resource_tracker()  # otherwise the fork server's start would start it, and unblock signals
    forkserver.ensure_running()
    os.chdir(str(here))
    return True


def _launch_config(spec: dict[str, Any]) -> Any:
    """The agent's settings, without those that this torch does not know."""
    from torch.distributed.launcher.api import LaunchConfig

    timeout_s: int = spec["timeout_s"]
    address: str | None = "127.0.0.1"
    # On one node there is a single agent, whose rendezvous is a file in the private folder of the job.
    rendezvous, configs = "c10d", {"store_type": "file", "timeout": timeout_s}
    if spec["nnodes"] > 1:
        from exp.launcher.rendezvous import RENDEZVOUS

        # Nodes may join at any time within the time-out; torch's own default is one minute.
        configs = {"timeout": timeout_s, "join_timeout": timeout_s, "read_timeout": min(timeout_s, 60)}
        configs["nproc"] = spec["nproc"]
        rendezvous, address = RENDEZVOUS, local_address_for(spec["rdzv_endpoint"])
    settings: dict[str, Any] = {
        "min_nodes": spec["min_nnodes"] or spec["nnodes"],
        "max_nodes": spec["nnodes"],
        "nproc_per_node": spec["nproc"],
        "run_id": spec["rdzv_id"],
        "rdzv_backend": rendezvous,
        "rdzv_endpoint": spec["rdzv_endpoint"],
        "rdzv_configs": configs,
        "max_restarts": spec["max_restarts"],
        "monitor_interval": 0.1,
        "shutdown_timeout": Patience.TERM_S,
        "start_method": _START_METHOD,
        "local_addr": address,
    }
    parameters = inspect.signature(LaunchConfig).parameters
    return LaunchConfig(**{name: value for name, value in settings.items() if name in parameters})


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads of torch's rendezvous may still be waiting, and would delay a normal exit.
    os._exit(code)
