"""A worker process, from its start to its exit: run folder, log, error file, clean-up.

What it computes is in :mod:`exp.session`. Torch's agent forks it (:mod:`exp.launcher.agent`) or runs
``python -m exp.launcher.worker RUN_FOLDER``. ``launcher=external`` runs ``python -m exp.launcher.worker GIVEN`` (JSON);
such a worker first checks that all ranks have the same command and run folder.
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
import time
import traceback
from datetime import timedelta
from multiprocessing import util
from pathlib import Path
from typing import Any, Iterator, NoReturn

from exp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, ExpError, Preempted, as_ours, message_of, told
from exp.launcher.outcome import Failures, RankFailure, is_of_peer, unfinished
from exp.launcher.processes import (
    AGENT_VARIABLE,
    die_with_parent,
    is_alive,
    name_process,
    start_resource_tracker,
)
from exp.launcher.rank import JOINED, SCRATCH_VARIABLE, RankInfo, make_store, this_host
from exp.runs import status
from exp.runs.files import write_json
from exp.runs.folder import RunFolder
from exp.runs.lock import LOCK, read_holder
from exp.runs.status import Stage, record_preempted
from exp.sockets import keep_sockets_in

__all__ = ["describe_error", "main", "reporting", "work_to_end"]

_SEEN_WITHIN_S = 60.0  # an NFS client may report a new file as missing for a while
_READ_WITHIN_S = 0.5
_CLEAN_UP_S = 20.0
_CLEAN_UP_AFTER_FAILURE_S = 3.0  # less than the launcher waits for the other ranks
_LOOKED_FOR_S = 3.0  # time for the launcher to find the rank that is missing, before the agent ends all others
_DONE_PATIENCE_S = 60.0
_STDERR = 2  # file descriptor; redirected to the log of the rank


def main(parent: int | None = None) -> None:
    """Run the worker, and end the process.

    Args:
        parent: process id of the fork server that forked this process, which must not outlive it; None: the agent or
            the external launcher started this process. After a fork, this function returns on success, because
            torch's agent waits for that.
    """
    argument, agent = sys.argv[1], int(os.environ[AGENT_VARIABLE])
    die_with_parent(signal.SIGKILL, agent if parent is None else parent)
    if not is_alive(agent):
        os._exit(EXIT_FAILED)
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        start_resource_tracker()  # otherwise the first loader process would start it, which unblocks SIGTERM
    external = argument.startswith("{")
    info, scratch = RankInfo.from_environment(os.environ, external), Path(os.environ[SCRATCH_VARIABLE])
    name_process(f"exp-rank{info.rank}")
    # Each attempt leaves a file for the launcher. Torch counts a restart only on the node where a worker died, so the
    # ranks of other nodes would not know that they have to resume.
    earlier = len(list(scratch.glob(f"attempt-{info.local_rank}-*")))
    (scratch / f"attempt-{info.local_rank}-{os.getpid()}").touch()
    info = dataclasses.replace(info, restart_count=max(info.restart_count, earlier))
    folder = _join(info, json.loads(argument), scratch / JOINED) if external else argument
    work_to_end(RunFolder(folder), info, returns=parent is not None)


def _join(info: RankInfo, given: dict[str, Any], joined: Path) -> str:
    """Check that all ranks have rank 0's command and see its run folder.

    Args:
        info: of this rank.
        given: the command of this rank (``overrides``, ``digest``), ``timeout_s`` and, on rank 0, ``folder``.
        joined: file in which the launcher finds the folder, or why this rank was refused.

    Returns:
        The run folder. If the ranks do not agree or do not meet, the process ends.
    """
    if info.world_size > 1:
        try:
            store = make_store(info, timedelta(seconds=given["timeout_s"]))
            if info.rank == 0:
                holder = read_holder(Path(given["folder"], LOCK))
                first = {**given, "secret": holder and holder.secret}
                store.set("exp/first", json.dumps(first))  # noqa: TID251 - plain strings
            first = json.loads(store.get("exp/first"))
            store.set(f"exp/wrong/{info.rank}", _difference(info.rank, given, first) or "")
            if info.rank == 0:
                every = (store.get(f"exp/wrong/{rank}").decode() for rank in range(info.world_size))
                store.set("exp/refused", next(filter(None, every), ""))
            refused = store.get("exp/refused").decode()
        except (RuntimeError, OSError) as error:  # there is no log yet; the launcher shows what this process prints
            os.write(_STDERR, f"{type(error).__name__}: {message_of(error)}\n".encode())
            os._exit(EXIT_FAILED)
        if refused:
            write_json(joined, {"refused": refused})
            time.sleep(_READ_WITHIN_S)  # rank 0 may serve the store, which the others still have to read
            os._exit(EXIT_CONFIG)
        info.met.append(store)
        given = first
    write_json(joined, {"folder": given["folder"], "restarts": info.restart_count})
    return str(given["folder"])


def _difference(rank: int, given: dict[str, Any], first: dict[str, Any]) -> str | None:
    """How the command or folder of a rank differs from rank 0's; None: it does not."""
    here = f"rank {rank} ({this_host()})"
    if given["overrides"] != first["overrides"]:
        mine, theirs = ([each for each in one["overrides"] if each not in other["overrides"]]
                        for one, other in ((given, first), (first, given)))  # fmt: skip
        what = f"{' '.join(mine) or 'nothing'} instead of {' '.join(theirs) or 'nothing'}; start all with the same"
        return f"{here} has another command than rank 0: {what}"
    if given["digest"] != first["digest"]:
        return f"{here} has another configuration than rank 0; let all ranks use the same files and folder"
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while time.monotonic() < deadline:
        holder = read_holder(Path(first["folder"], LOCK))
        if holder is not None and holder.secret == first["secret"]:
            return None
        time.sleep(0.1)
    return f"{here} does not see rank 0's run folder {first['folder']}; set output_dir=<a folder that all nodes share>"


def work_to_end(folder: RunFolder, info: RankInfo, returns: bool = False) -> None:
    """Run the worker, and end this process. Reports to the launcher go into the job's scratch folder.

    Args:
        folder: the run folder.
        info: of this rank.
        returns: on success return, and run the clean-up when the process exits by itself.
    """
    scratch = os.environ[SCRATCH_VARIABLE]
    status.begin(scratch, info.local_rank, info.rank)
    keep_sockets_in(scratch)
    try:
        with reporting(folder, info, redirect=True):
            from exp import session

            session.run(folder, info)
    except Preempted as preempted:
        record_preempted(scratch, preempted.step)  # the exit code stays 0: torch's agent restarts on any other code
    except BaseException as error:  # noqa: BLE001 - the log and the error file have it
        if is_of_peer(error):
            time.sleep(_LOOKED_FOR_S)
        _exit(error.exit_code if isinstance(error, ExpError) else EXIT_FAILED, info)
    status.beat(Stage.DONE)
    if returns:
        # Runs before all other clean-up of multiprocessing in a forked process.
        util.Finalize(None, _exit, (EXIT_OK, info), exitpriority=sys.maxsize)
        return
    # If the clean-up of a device crashes, torch's agent ends the other ranks of the node: wait for them first.
    deadline = time.monotonic() + _DONE_PATIENCE_S
    while time.monotonic() < deadline and any(unfinished(scratch)):
        time.sleep(0.02)
    _exit(EXIT_OK, info)


def _exit(code: int, info: RankInfo) -> NoReturn:
    """Run the clean-up of the device (:attr:`RankInfo.at_end`), and exit without the interpreter's own clean-up.

    After a failure the interpreter's clean-up can wait for ranks that will never answer. After success, native threads
    of autograd and gloo race with it, although everything is written and the process group is destroyed: on torch 2.13
    about one in ten two-rank runs died of "terminate called without an active exception" (pytorch pull request 180701).

    The device's clean-up runs in this thread, which has selected the device. Its time limit does not need the
    interpreter lock, because a driver may hang while it holds the lock. The error file or the last heartbeat has
    already reported how the run ended, so errors of the clean-up change nothing.
    """
    patience = _CLEAN_UP_S if code == EXIT_OK else _CLEAN_UP_AFTER_FAILURE_S
    faulthandler.dump_traceback_later(patience, exit=True, file=_STDERR)
    for action in info.at_end:
        try:
            action()
        except BaseException:  # noqa: BLE001 - a vendor's library may raise anything; the run is over
            os.write(_STDERR, f"clean-up failed\n{traceback.format_exc()}".encode())
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


@contextlib.contextmanager
def reporting(folder: RunFolder, info: RankInfo, redirect: bool) -> Iterator[None]:
    """Context in which a rank runs: log records go to the rank's log, an error to the log and the error file.

    Args:
        folder: the run folder.
        info: of this rank.
        redirect: send stderr and stdout to the log of the rank, except what Python prints to stdout on rank 0, which
            goes to the terminal.

    Raises:
        Exception: the error of the run, unchanged; ``SystemExit`` counts as a failure, too.
    """
    log, error_file = folder.log_file(info.rank), folder.error_file(info.rank)
    if error_file.exists():
        error_file.unlink()
    if redirect:
        _redirect(log, keep_stdout=info.rank == 0)
    logging.raiseExceptions = False  # on a full disk the run itself raises a clear error
    handler = logging.FileHandler(log, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    except Preempted as preempted:
        logging.getLogger(__name__).info("%s", preempted)
        raise
    except (Exception, SystemExit) as error:  # SystemExit: a library that calls sys.exit must not end a run silently
        logging.getLogger(__name__).error("rank %d failed\n%s", info.rank, traceback.format_exc())
        Failures(folder, os.environ.get(SCRATCH_VARIABLE)).write(describe_error(error, folder, info))
        raise
    finally:
        if info.world_size > 1:
            # The frames of the error hold the wrapped model, which must be released before the interpreter exits.
            traceback.clear_frames(sys.exc_info()[2])
        logging.getLogger().removeHandler(handler)
        logging.captureWarnings(False)
        with contextlib.suppress(OSError):
            handler.close()


def describe_error(error: BaseException, folder: RunFolder, info: RankInfo) -> RankFailure:
    """The failure of this rank, as its error file records it."""
    ours, of_peer = as_ours(error, folder.path), is_of_peer(error)
    message = None if ours is not None or of_peer else told(error)
    return RankFailure(
        info.rank,
        info.local_rank,
        type(ours or error).__name__,
        message or message_of(ours or error) or "no message",
        EXIT_FAILED if ours is None else ours.exit_code,
        log=str(folder.log_file(info.rank)),
        pid=os.getpid(),
        of_peer=of_peer,
        own=ours is not None,
    )


def _redirect(log: Path, keep_stdout: bool) -> None:
    """Point the file descriptors at the log, so that native code writes there too.

    With ``keep_stdout`` Python's ``sys.stdout`` keeps the terminal. Native libraries print to the log: gloo prints a
    line per peer, vendors' libraries their versions.
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


if __name__ == "__main__":
    main()
