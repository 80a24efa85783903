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
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Iterator, Mapping

from exp import heartbeat
from exp.launcher.fork_server import START_METHOD, start_fork_server, work
from exp.launcher.hang_detector import unfinished
from exp.launcher.outcome import describe_end, leave_word
from exp.launcher.ports import address_towards
from exp.launcher.processes import AGENT_VARIABLE, JOB_VARIABLE, kill_job, name_process
from exp.runfolder import RunFolder, write_json

__all__ = ["main"]

logger = logging.getLogger(__name__)

_TERM_PATIENCE_S = 3


def main() -> int:
    """Run the order in ``sys.argv[1]`` (JSON, written by the torchrun launcher) and report how it ended."""
    gc.disable()  # a fifth of the time that importing torch takes, and later there is next to nothing to collect
    order: dict[str, Any] = json.loads(sys.argv[1])
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    name_process("exp-agent")
    report: dict[str, Any] = {"succeeded": False, "restarts": 0, "error": None}
    ends: Mapping[int, Any] = {}
    folder = RunFolder(order["run_dir"])
    forked = start_fork_server(folder, order["nproc"], single_node=order["nnodes"] == 1)
    # What workers must not have from here comes after the fork.
    watcher = _watch_parent(order["parent"], order["scratch"])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s agent %(levelname)s %(message)s")
    with _without_plugins():
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

    try:
        if forked:
            elastic_launch(_launch_config(order), work)(order["run_dir"])
        else:
            elastic_launch(_launch_config(order), sys.executable)("-m", "exp.launcher.worker", order["run_dir"])
        report["succeeded"] = True
    except ChildFailedError as error:
        ends = error.failures
    except Exception as error:  # whatever torch's agent raises, the parent must hear of it
        logger.exception("the agent failed")
        report["error"] = f"{type(error).__name__}: {error}"
    report["restarts"] = _restarts(Path(order["scratch"]))
    if report["error"] is None:
        report["succeeded"] = _came_to_end(folder, order["scratch"], ends, report["restarts"])
    write_json(Path(order["report"]), report)
    gc.collect()  # objects of multiprocessing remove their semaphores when they go
    if os.getppid() != order["parent"]:
        watcher.join()  # the parent is dead, and the thread at work: it ends this process when nothing is left
    return 0 if report["succeeded"] else 1


def _came_to_end(folder: RunFolder, scratch: str, ends: Mapping[int, Any], restarts: int) -> bool:
    """Whether all workers of this node have done what they had to; those that have not get error files.

    One that ended with code 0 before its end has not: something in it has called ``exit``. One that had come to it and
    then died in its device's clean-up has: all that it was to write is written; its log says how it died.

    Args:
        folder: the run folder.
        scratch: the private folder of the job on this node.
        ends: torch's ``ProcessFailure`` by rank, of processes that failed, or that the agent ended then: it ends the
            others by SIGTERM, and by SIGKILL seconds later.
        restarts: of the workers.
    """
    early = unfinished(scratch, alive=False)
    beats = dict(enumerate(heartbeat.read(scratch)))
    if not ends or not beats:  # or the parent has died and the folder is gone
        for local_rank, beat in early:
            leave_word(folder, scratch, beat, local_rank, 0, restarts)
        return not early and not ends
    if not early and all(beat.pid for beat in beats.values()):
        for rank, end in ends.items():
            with contextlib.suppress(OSError), folder.log_file(rank).open("a", encoding="utf-8") as log:
                how = describe_end(end.exitcode)[1]
                log.write(f"{how}, in the clean-up of its device; what it had to write was written\n")
        return True
    first = min(end.timestamp for end in ends.values())
    causes = {
        rank: end
        for rank, end in ends.items()
        if end.exitcode != -signal.SIGTERM and end.timestamp < first + _TERM_PATIENCE_S
    }
    for rank, end in (causes or ends).items():  # else it was somebody else's SIGTERM
        beat = beats[end.local_rank]._replace(pid=end.pid, rank=rank)  # it may have ended before its first
        leave_word(folder, scratch, beat, end.local_rank, end.exitcode, restarts, end.timestamp)
    return False


@contextlib.contextmanager
def _without_plugins() -> Iterator[None]:
    """Have torch load no device's plug-in: this process touches no device, and one may fail to load."""
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _watch_parent(parent: int, scratch: str) -> threading.Thread:
    """End the whole job when the parent dies without having ended it, of SIGKILL for instance.

    A thread, not a signal: torch's agent takes the signals, and waits half a minute for a worker that ignores them.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        kill_job(os.environ[JOB_VARIABLE])
        for _ in range(40):  # torch's agent, in the main thread, may still write there
            shutil.rmtree(scratch, ignore_errors=True)
            if not os.path.exists(scratch):  # noqa: PTH110
                break
            time.sleep(0.05)
        os._exit(1)

    thread = threading.Thread(target=watch, name="watch-parent", daemon=True)
    thread.start()
    return thread


def _launch_config(order: dict[str, Any]) -> Any:
    """The agent's settings; torch 1.10 does not know all of them."""
    from torch.distributed.launcher.api import LaunchConfig

    from exp.launcher.rendezvous import RENDEZVOUS

    single = order["nnodes"] == 1
    configs: dict[str, Any] = {"store_type": "file" if single else "tcp", "timeout": order["timeout_s"]}
    if not single:
        # Nodes may come at any time within the time-out; without this, torch gives up after its own minute.
        configs["join_timeout"] = order["timeout_s"]
        configs["read_timeout"] = min(order["timeout_s"], 60)
    settings: dict[str, Any] = {
        "min_nodes": order["nnodes"],
        "max_nodes": order["nnodes"],
        "nproc_per_node": order["nproc"],
        "run_id": order["rdzv_id"],
        "rdzv_backend": RENDEZVOUS,
        "rdzv_endpoint": order["endpoint"],
        "rdzv_configs": configs,
        "max_restarts": order["max_restarts"],
        "monitor_interval": 0.1,
        "shutdown_timeout": _TERM_PATIENCE_S,
        "start_method": START_METHOD,
    }
    address = "127.0.0.1" if single else address_towards(order["endpoint"])
    if address is not None:
        settings["local_addr"] = address
    known = inspect.signature(LaunchConfig).parameters
    # Torch keeps its own logs for ever, in a new folder under /tmp for each job; ours are in the run folder.
    logs = str(Path(order["scratch"], "torch"))
    if "logs_specs" in known:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

        settings["logs_specs"] = DefaultLogsSpecs(log_dir=logs)
    else:
        settings["log_dir"] = logs
    return LaunchConfig(**{name: value for name, value in settings.items() if name in known})


def _restarts(scratch: Path) -> int:
    """How often the workers of this node were started again: each attempt of theirs leaves a mark."""
    attempts = Counter(path.name.split("-")[1] for path in scratch.glob("attempt-*"))
    return max(attempts.values(), default=1) - 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads of torch's rendezvous may still be waiting; the report is written, nothing else matters.
    os._exit(code)
