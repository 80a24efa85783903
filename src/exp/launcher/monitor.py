"""A worker's parent: it outlives the worker, so that somebody can say when and of what the worker died.

A process that is killed leaves no error behind, and torch's elastic agent, which looks now and then, cannot tell a
rank that somebody killed from one that it has ended itself. The monitor forks the worker before anything else is
loaded, waits, and leaves an error file where the worker could not write one.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from exp import heartbeat
from exp.errors import EXIT_FAILED
from exp.heartbeat import Stage
from exp.launcher.failures import describe_end
from exp.launcher.outcome import error_record
from exp.launcher.processes import AGENT_VARIABLE, die_with_parent, is_alive, name_process
from exp.launcher.rank import SCRATCH_VARIABLE
from exp.runfolder import read_json, write_json

if TYPE_CHECKING:
    from exp.runfolder import RunFolder

__all__ = ["begin_to_end", "ended_well", "go_on_monitored", "write_failure"]

_ENDING = "ending"


def begin_to_end(scratch: str) -> None:
    """Note that the processes of this node's job are about to be killed by us: that is nobody's failure."""
    if os.path.isdir(scratch):  # noqa: PTH112
        Path(scratch, _ENDING).touch()


def go_on_monitored(folder: RunFolder, parent: int) -> bool:
    """Fork: the worker goes on in the child, and this process monitors it.

    Args:
        folder: the run folder.
        parent: process that neither may outlive.

    Returns:
        In the worker: True; in the monitor, once the worker has ended well: False. After any other end the monitor ends
        as the worker did, and does not return.
    """
    monitor = os.getpid()
    agent = int(os.environ[AGENT_VARIABLE])
    die_with_parent(signal.SIGKILL, parent)
    if not is_alive(agent):
        os._exit(1)
    pid = os.fork()
    if pid == 0:
        die_with_parent(signal.SIGKILL, monitor)
        return True
    told: list[int] = []

    def tell(number: int, _frame: object) -> None:
        told.append(number)
        os.kill(pid, number)

    signal.signal(signal.SIGTERM, tell)
    name_process(f"exp-monitor{os.environ['RANK']}")
    # The dead worker keeps its number until it is fetched: told to end meanwhile, the monitor hits nobody else.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
    _, status = os.waitpid(pid, 0)
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    scratch, rank, local_rank = os.environ[SCRATCH_VARIABLE], int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if (code == 0 or not told) and ended_well(folder, scratch, rank, local_rank, pid, code):
        return False
    ended_by_us = told or signal.SIGTERM in signal.sigpending() or Path(scratch, _ENDING).exists()
    if not ended_by_us:
        write_failure(folder, pid, code, rank, local_rank, scratch=scratch)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(monitor, -code)
    os._exit(code if code > 0 else EXIT_FAILED)


def ended_well(folder: RunFolder, scratch: str, rank: int, local_rank: int, pid: int, code: int) -> bool:
    """Whether a worker has come to its end.

    One that ended with code 0 before it has not: something in it has called ``exit``. One that had come to it and then
    died in its device's clean-up has: all that it was to write is written; its log says how it died.
    """
    beats = heartbeat.read(scratch)
    if len(beats) <= local_rank or beats[local_rank].pid != pid:
        return code == 0
    if beats[local_rank].stage != Stage.DONE:
        return False
    if code != 0:
        with contextlib.suppress(OSError), folder.log_file(rank).open("a", encoding="utf-8") as log:
            log.write(f"{describe_end(code)[1]}, in the clean-up of its device; what it had to write was written\n")
    return True


def write_failure(
    folder: RunFolder, pid: int, code: int, rank: int, local_rank: int, told: bool = False, scratch: str = ""
) -> None:
    """An error file for a worker that has left none.

    Args:
        folder: the run folder.
        pid: of the worker.
        code: its exit code; negative for a signal.
        rank: its rank.
        local_rank: its rank on this node.
        told: whether it was told to end: then something else was the cause.
        scratch: the private folder of the job, which tells how far it had come.
    """
    path = folder.error_file(rank)
    if (read_json(path) or {}).get("pid") == pid:
        return
    kind, message = describe_end(code)
    if code == 0:
        beats = heartbeat.read(scratch)
        step = next((beat.step for beat in beats if beat.pid == pid), 0)
        code = EXIT_FAILED
        kind, message = "EndedEarly", f"exited with code 0 before its time, in step {step}, while other ranks went on"
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    write_json(path, error_record(rank, local_rank, pid, kind, message, code, restart, of_peer=told))
