"""The agent process: torch's elastic agent around the workers of one node. Run as ``python -m exp.launcher.agent``."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from typing import Any, Mapping

from exp.launcher.fork_server import START_METHOD, start_fork_server, work
from exp.launcher.outcome import failure_of, unfinished, write_error
from exp.launcher.ports import address_towards
from exp.launcher.processes import AGENT_VARIABLE, JOB_VARIABLE, kill_job, name_process
from exp.launcher.rank import SCRATCH_VARIABLE
from exp.runs import status
from exp.runs.folder import RunFolder

__all__ = ["main"]

logger = logging.getLogger(__name__)

_TERM_PATIENCE_S = 3
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def main() -> int:
    """Run the launch spec in ``sys.argv[1]`` (JSON, of the torchrun launcher); returns 0 where all went well."""
    gc.disable()  # a fifth of the time that importing torch takes, and later there is next to nothing to collect
    spec: dict[str, Any] = json.loads(sys.argv[1])
    folder, scratch = RunFolder(spec["run_dir"]), os.environ[SCRATCH_VARIABLE]
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    name_process("exp-agent")
    forked = start_fork_server(folder, spec["nproc"], single_node=spec["nnodes"] == 1)
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
    succeeded = ends is not None and _came_to_end(folder, scratch, ends)
    gc.collect()  # objects of multiprocessing remove their semaphores when they go
    if os.getppid() != spec["parent"]:
        watcher.join()  # the parent is dead, and the thread at work: it ends this process when nothing is left
    return 0 if succeeded else 1


def _came_to_end(folder: RunFolder, scratch: str, ends: Mapping[int, Any]) -> bool:
    """Whether all workers of this node have done what they had to; those that have not get error files.

    One that ended with code 0 before its end has not: something in it has called ``exit``. One that had come to it and
    then died in its device's clean-up has: all that it was to write is written; its log says how it died.

    Args:
        folder: the run folder.
        scratch: the private folder of the job on this node.
        ends: torch's ``ProcessFailure`` by rank, of processes that failed, or that the agent ended then: it ends the
            others by SIGTERM, and by SIGKILL seconds later.
    """
    early, beats = unfinished(scratch, alive=False), status.read(scratch)
    if not ends or not beats:  # or the parent has died and the folder is gone
        for local_rank, beat in early:
            write_error(folder, failure_of(beat, local_rank, 0), scratch)
        return not early and not ends
    come = not early and all(beat.pid for beat in beats)
    first = min(end.timestamp for end in ends.values())
    causes = {
        rank: end
        for rank, end in ends.items()
        if end.exitcode != -signal.SIGTERM and end.timestamp < first + _TERM_PATIENCE_S
    }
    for rank, end in (causes or ends).items():  # else it was somebody else's SIGTERM
        beat = beats[end.local_rank]._replace(pid=end.pid, rank=rank)  # it may have ended before its first
        failure = replace(failure_of(beat, end.local_rank, end.exitcode), time=end.timestamp)
        if not come:
            write_error(folder, failure, scratch)
            continue
        with contextlib.suppress(OSError), folder.log_file(rank).open("a", encoding="utf-8") as log:
            log.write(f"{failure.message}, in the clean-up of its device; what it had to write was written\n")
    return come


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
        "shutdown_timeout": _TERM_PATIENCE_S,
        "start_method": START_METHOD,
        "local_addr": address,
    }
    known = inspect.signature(LaunchConfig).parameters
    return LaunchConfig(**{name: value for name, value in settings.items() if name in known})


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads of torch's rendezvous may still be waiting; nothing else matters.
    os._exit(code)
