"""A worker process: how it comes to its run, its log, its error file, and its end.

What it computes is in :mod:`exp.session`. Run as ``python -m exp.launcher.worker RUN_FOLDER`` by torch's agent, and as
``python -m exp.launcher.worker --external SPEC`` where somebody else's launcher has started the job: then it agrees
with the others on one run and one folder first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

from exp import heartbeat
from exp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ExpError, Preempted
from exp.heartbeat import Stage
from exp.launcher.hang_detector import unfinished
from exp.launcher.outcome import RankFailure, is_of_peer, write_error
from exp.launcher.processes import AGENT_VARIABLE, die_with_parent, is_alive, name_process, start_resource_tracker
from exp.launcher.rank import JOINED, SCRATCH_VARIABLE, RankInfo, make_store, this_host
from exp.preemption import record_preempted
from exp.raised import message_of, told
from exp.runfolder import RunFolder, read_json, write_json
from exp.sockets import keep_sockets_in
from exp.system_errors import as_ours

__all__ = ["describe_error", "main", "main_external", "run_worker", "work_to_end"]

_CLEAN_UP_S = 20.0
_CLEAN_UP_AFTER_FAILURE_S = 3.0  # less than the launcher's patience with the other ranks
_LOOKED_FOR_S = 3.0  # the launcher looks for the rank that has not come, before its agent ends all others
_DONE_PATIENCE_S = 60.0
_MEETING = "meeting.json"
_SEEN_WITHIN_S = 60.0  # an NFS client may keep saying for a while that a new file is not there
_STDERR = 2  # the log of the rank


def main(parent: int | None = None) -> None:
    """Run the worker that the agent started; the process ends here.

    Args:
        parent: the fork server that this process comes from, which it must not outlive; None: the agent started it.
            After a fork, this function returns where all went well: torch's agent waits for that.
    """
    folder, agent = RunFolder(sys.argv[1]), int(os.environ[AGENT_VARIABLE])
    die_with_parent(signal.SIGKILL, agent if parent is None else parent)
    if not is_alive(agent):
        os._exit(EXIT_FAILED)
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        start_resource_tracker()  # else the first loader process would do it, and let SIGTERM through
    info = RankInfo.from_environment(os.environ)
    name_process(f"exp-rank{info.rank}")
    info = _count_attempts(info, Path(os.environ[SCRATCH_VARIABLE]))
    work_to_end(folder, info, returns=parent is not None)


def main_external() -> None:
    """Do what ``sys.argv[2]`` (JSON, of :mod:`exp.launcher.external`) says; the process ends here."""
    spec: dict[str, Any] = json.loads(sys.argv[2])
    die_with_parent(signal.SIGKILL, spec["parent"])
    start_resource_tracker()
    info = RankInfo.from_environment(os.environ, external=True)
    name_process(f"exp-rank{info.rank}")
    joined, folder = Path(os.environ[SCRATCH_VARIABLE], JOINED), spec["folder"]
    if info.world_size > 1:
        info.met.append(make_store(info, timedelta(seconds=spec["timeout_s"])))
        folder, refused = _agree(info.met[0], info.rank, info.world_size, spec)
        if refused is not None:
            write_json(joined, {"refused": refused})
            time.sleep(0.5)  # rank 0 may hold the store: the others have to read it
            os._exit(EXIT_CONFIG)
    write_json(joined, {"folder": folder, "restarts": info.restart_count})
    work_to_end(RunFolder(folder), info)


def work_to_end(folder: RunFolder, info: RankInfo, returns: bool = False) -> None:
    """Run the worker in a process of its own, which ends here; its reports to the launcher are in the scratch folder.

    Args:
        folder: the run folder.
        info: this rank's place.
        returns: return where all went well, and end the process when that ends by itself.
    """
    scratch = os.environ[SCRATCH_VARIABLE]
    heartbeat.begin(scratch, info.local_rank, info.rank)
    keep_sockets_in(scratch)
    try:
        run_worker(folder, info, redirect=True)
    except Preempted as preempted:
        record_preempted(scratch, preempted.step)  # to torch's agent anything else is a failure, and may mean a restart
    except ExpError as error:
        _exit(error.exit_code, info)
    except BaseException as error:  # noqa: BLE001 - it is in the log and in the error file
        if is_of_peer(error):
            time.sleep(_LOOKED_FOR_S)
        _exit(EXIT_FAILED, info)
    heartbeat.beat(Stage.DONE)
    if returns:
        # The first that multiprocessing does at the end of a process that it has forked.
        util.Finalize(None, _exit, (EXIT_OK, info), exitpriority=sys.maxsize)
        return
    # Where the clean-up of a device crashes, torch's agent ends the other ranks of the node.
    deadline = time.monotonic() + _DONE_PATIENCE_S
    while time.monotonic() < deadline and any(unfinished(scratch)):
        time.sleep(0.02)
    _exit(EXIT_OK, info)


def _count_attempts(info: RankInfo, scratch: Path) -> RankInfo:
    """Mark this attempt for the agent, and correct the restart count.

    Torch counts a restart only on the node where a worker died: the ranks of the others would not know that they have
    to resume.
    """
    earlier = len(list(scratch.glob(f"attempt-{info.local_rank}-*")))
    (scratch / f"attempt-{info.local_rank}-{os.getpid()}").touch()
    return dataclasses.replace(info, restart_count=max(info.restart_count, earlier))


def _exit(code: int, info: RankInfo) -> NoReturn:
    """End without the interpreter's clean-up, but for what the rank's device needs (:attr:`RankInfo.at_end`).

    After a failure it can wait for ranks that will never answer. After success, with everything written and the group
    destroyed, native threads of autograd and gloo still race with it: on torch 2.13, one in some ten two-rank runs died
    there of "terminate called without an active exception" (pytorch pull request 180701).
    """
    _clean_up(code, info)
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


def _clean_up(code: int, info: RankInfo) -> None:
    """Do what has to be done last, for so long and no longer; its errors are logged, and do not change how a run ended.

    In this thread, which is the one that has selected the device. Two bounds: a thread, which ends the process with
    ``code``; and, against a driver that hangs while it holds the interpreter's lock, faulthandler's, which needs none.
    """
    if not info.at_end:
        return
    patience = _CLEAN_UP_S if code == EXIT_OK else _CLEAN_UP_AFTER_FAILURE_S

    def give_up() -> None:
        faulthandler.dump_traceback(_STDERR)
        os._exit(code)

    timer = threading.Timer(patience, give_up)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(2 * patience, exit=True, file=_STDERR)
    for action in info.at_end:
        try:
            action()
        except BaseException:  # noqa: BLE001 - of a vendor's library; the run is over, and an exit is below
            os.write(_STDERR, f"clean-up failed\n{traceback.format_exc()}".encode())
    timer.cancel()
    faulthandler.cancel_dump_traceback_later()


def run_worker(folder: RunFolder, info: RankInfo, redirect: bool) -> None:
    """Do this rank's part; an error goes to the rank's log and error file, and is raised.

    Args:
        folder: the run folder.
        info: this rank's place.
        redirect: send stderr and stdout to the log of the rank; what Python writes to rank 0's stdout is for the
            terminal.

    Raises:
        Exception: what the run raises, as it is; ``SystemExit`` counts as a failure, too.
    """
    log = folder.log_file(info.rank)
    error_file = folder.error_file(info.rank)
    if error_file.exists():
        error_file.unlink()
    if redirect:
        _redirect(log, keep_stdout=info.rank == 0)
    handler = _log_to(log)
    try:
        from exp import session

        session.run(folder, info)
    except Preempted as preempted:
        logging.getLogger(__name__).info("%s", preempted)
        raise
    except (Exception, SystemExit) as error:  # SystemExit: a library that gives up must not end a run without a word
        logging.getLogger(__name__).error("rank %d failed\n%s", info.rank, traceback.format_exc())
        write_error(error_file, describe_error(error, folder, info), os.environ.get(SCRATCH_VARIABLE))
        raise
    finally:
        if info.world_size > 1:
            # The frames of an error hold the wrapped model; they must let go of it before the interpreter exits.
            traceback.clear_frames(sys.exc_info()[2])
        logging.getLogger().removeHandler(handler)
        logging.captureWarnings(False)
        with contextlib.suppress(OSError):
            handler.close()


def describe_error(error: BaseException, folder: RunFolder, info: RankInfo) -> RankFailure:
    """What the launcher has to know of an error."""
    ours, of_peer = as_ours(error, folder.path), is_of_peer(error)
    message = None if ours is not None or of_peer else told(error)
    return RankFailure(
        info.rank,
        info.local_rank,
        type(ours or error).__name__,
        message or message_of(ours or error) or "no message",
        EXIT_FAILED if ours is None else ours.exit_code,
        log=str(folder.log_file(info.rank)),
        restart=info.restart_count,
        pid=os.getpid(),
        of_peer=of_peer,
        own=ours is not None,
    )


class _LogFile(logging.FileHandler):
    """Of a disk that is full nothing is said here: the run itself will find out."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Where logging would print a traceback to the terminal."""


def _redirect(log: Path, keep_stdout: bool) -> None:
    """Point the file descriptors at the log, so that native code writes there too.

    Where stdout is kept, it is Python's alone: some builds of gloo greet each peer there, and vendors' libraries tell
    their versions.
    """
    descriptor = os.open(str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 2)
    if keep_stdout:
        kept = sys.stdout
        sys.stdout = open(os.dup(1), "w", buffering=1, encoding=kept.encoding, errors=kept.errors)  # noqa: PTH123, SIM115
    os.dup2(descriptor, 1)
    os.close(descriptor)


def _log_to(log: Path) -> logging.Handler:
    """Send Python's logging and warnings to the log."""
    handler = _LogFile(log, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    return handler


def _agree(store: Any, rank: int, world_size: int, spec: dict[str, Any]) -> tuple[str, str | None]:
    """One command, one folder; returns the folder, and what is wrong, the same on every rank.

    Rank 0 compares. Every rank tells it what it was given, and then whether it finds rank 0's folder.
    """
    told = {"host": this_host(), "digest": spec["digest"], "overrides": spec["overrides"]}
    store.set(f"exp/given/{rank}", json.dumps(told))  # noqa: TID251 - plain strings
    if rank == 0:
        others = [json.loads(store.get(f"exp/given/{other}")) for other in range(1, world_size)]
        wrong = next((_differs(number, other, told) for number, other in enumerate(others, 1) if
                      _differs(number, other, told)), None)  # fmt: skip
        token = f"{os.getpid()}-{time.time_ns()}"
        folder = spec["folder"]
        write_json(Path(folder, "logs", _MEETING), {"token": token})
        store.set("exp/folder", json.dumps([folder, token, wrong]))  # noqa: TID251
    folder, token, wrong = json.loads(store.get("exp/folder"))
    if wrong is None:
        store.set(f"exp/seen/{rank}", "yes" if _sees(folder, token) else this_host())
        if rank == 0:
            for other in range(world_size):
                seen = store.get(f"exp/seen/{other}").decode()
                if seen != "yes":
                    wrong = (
                        f"rank {other} ({seen}) does not see rank 0's run folder {folder}; "
                        "set output_dir=<a folder that all nodes share>"
                    )
                    break
            Path(folder, "logs", _MEETING).unlink()
            store.set("exp/go", wrong or "go")
        word = store.get("exp/go").decode()
        wrong = None if word == "go" else word
    return folder, wrong


def _differs(rank: int, other: dict[str, Any], first: dict[str, Any]) -> str | None:
    where = f"rank {rank} ({other['host']}) was given another command than rank 0"
    if other["overrides"] != first["overrides"]:
        mine, theirs = ([each for each in one["overrides"] if each not in two["overrides"]]
                        for one, two in ((first, other), (other, first)))  # fmt: skip
        return f"{where}: {' '.join(theirs) or 'nothing'} instead of {' '.join(mine) or 'nothing'}; give all the same"
    if other["digest"] != first["digest"]:
        return f"{where}: its configuration differs, though not the arguments; have all use the same files and folder"
    return None


def _sees(folder: str, token: str) -> bool:
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while True:
        found = read_json(Path(folder, "logs", _MEETING))
        if found is not None and found["token"] == token:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


if __name__ == "__main__":
    if sys.argv[1] == "--external":
        try:
            main_external()
        except Exception as error:  # noqa: BLE001 - it has no log yet: its parent shows what it says here
            sys.stderr.write(f"{type(error).__name__}: {message_of(error)}\n")
            sys.stderr.flush()
            os._exit(EXIT_FAILED)
    else:
        main()
