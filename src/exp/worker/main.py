"""A worker process, from its start to its exit: rank environment, heartbeats, clean-up; and its guard.

What it computes is in :mod:`exp.worker.session`. Each worker is forked from a guard, a small process that waits for it
and records how it ended: only the parent of a process learns its exit status. The guard is forked by torch's agent
(:mod:`exp.launcher.agent`) or by ``launcher=local``, or runs ``python -m exp.worker.main RUN_FOLDER``.
``launcher=external`` runs ``python -m exp.worker.main GIVEN`` (JSON); such a worker first checks that all ranks have
the same command and run folder.
"""

from __future__ import annotations

import faulthandler
import io
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, NoReturn

from exp.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    ExpError,
    Preempted,
    error_message,
    is_user_file,
    no_terminal,
)
from exp.runs import heartbeat
from exp.runs.failures import Failures, Patience, is_caused_by_peer
from exp.runs.files import read_json, write_json
from exp.runs.folder import RunFolder
from exp.runs.heartbeat import Stage
from exp.runs.job import (
    LEAVING_FLAG,
    NODES_FILE,
    PREEMPT_FLAG,
    PREEMPTED_FILE,
    REFORM_FLAG,
    RUN_FOLDER_FILE,
    SCRATCH_VARIABLE,
    set_socket_folder,
)
from exp.runs.lock import LOCK, is_alive, read_holder
from exp.session import RankInfo
from exp.worker import processes, session
from exp.worker.processes import AGENT_VARIABLE, REQUEUES_VARIABLE
from exp.worker.session import make_store, reporting

__all__ = ["guard", "main", "preempted_in", "run_and_exit"]

_NFS_TIMEOUT_S = 60.0  # an NFS client may report a new file as missing for a while
_READ_WITHIN_S = 0.5
_STDERR = 2  # file descriptor; in the session it is the log of the rank


def main(argument: str, forked: bool = False) -> int:
    """Run a worker and its guard; return the exit code of the guard (:func:`guard`).

    Args:
        argument: the run folder; with ``launcher=external`` what this rank knows of the run, as JSON.
        forked: whether the fork server forked this process, which must not outlive it; otherwise the agent or the
            external launcher started this process.
    """
    agent, external = int(os.environ[AGENT_VARIABLE]), argument.startswith("{")
    if not external:
        processes.die_with_parent(signal.SIGKILL, os.getppid() if forked else agent)
    if not is_alive(agent):
        os._exit(EXIT_FAILED)
    info = RankInfo.of(os.environ, preempted=preempted_in(os.environ[SCRATCH_VARIABLE]))
    return guard(lambda: _work(argument, info), info, None if external else argument, agent if external else None)


def preempted_in(scratch: str) -> Callable[[], bool]:
    """A function that tells whether the job with this private folder has to save its state and end."""
    flags = str(Path(scratch, PREEMPT_FLAG)), str(Path(scratch, REFORM_FLAG))
    return lambda: any(map(os.path.exists, flags))


def guard(work: Callable[[], NoReturn], info: RankInfo, folder: str | None, parent: int | None = None) -> int:
    """Fork the worker, wait for its end, and write the error file of a worker that ended before its work was done.

    Args:
        work: what the worker does; it ends the process.
        info: of the rank.
        folder: the run folder; None: the worker reports it once all ranks have met.
        parent: process id of the launcher, whose death is to end the job; None: the kernel ends this process then.

    Returns:
        0 if the worker reached its end, also if it died after that, in the clean-up of its device; otherwise its exit
        code, 128 + the number of the signal that killed it, or 1.
    """
    guard_pid, scratch = os.getpid(), os.environ[SCRATCH_VARIABLE]
    pid = os.fork()
    if pid == 0:
        try:
            processes.die_with_parent(signal.SIGKILL, guard_pid)
            processes.name_process(f"exp-rank{info.rank}")
            work()
        finally:
            os._exit(EXIT_FAILED)
    processes.name_process(f"exp-guard{info.rank}")
    stopped = False

    def stop(_number: int, _frame: object) -> None:
        # By torch's agent, which may be faster than this process's turn to record an end; or the parent has died.
        nonlocal stopped
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            stopped = True
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    watcher = None
    if parent is not None:
        processes.die_with_parent(signal.SIGTERM, parent)
        watcher = processes.watch_parent(parent, scratch)
    code = processes.exit_code_of(os.waitpid(pid, 0)[1])
    if watcher is not None and os.getppid() != parent:
        watcher.join()  # it ends the job and this process
    if stopped:
        return EXIT_FAILED
    if Path(scratch, f"{LEAVING_FLAG}-{pid}").exists():  # the agent ends this process when it forms the next round
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        Path(scratch, f"{REFORM_FLAG}-{info.local_rank}").touch()
        while True:
            signal.pause()
    folder = folder or (read_json(Path(scratch, RUN_FOLDER_FILE)) or {}).get("folder")
    if folder and Failures(RunFolder(Path(folder)), scratch).record_end(info.rank, info.local_rank, code, pid):
        return EXIT_OK
    return 128 - code if code < 0 else code or EXIT_FAILED


def _work(argument: str, info: RankInfo) -> NoReturn:
    """Take the rank from the environment, and run the worker."""
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []):
        processes.start_resource_tracker()  # otherwise the first loader process would start it, which unblocks SIGTERM
    external, scratch = argument.startswith("{"), Path(os.environ[SCRATCH_VARIABLE])
    restarts, requeues = (int(os.environ.get(name, 0)) for name in ("TORCHELASTIC_RESTART_COUNT", REQUEUES_VARIABLE))
    # Each attempt leaves a file for the launcher. Torch counts a restart only on the node where a worker died, so the
    # ranks of other nodes would not know that they have to resume.
    earlier = len(list(scratch.glob(f"attempt-{info.local_rank}-*")))
    (scratch / f"attempt-{info.local_rank}-{os.getpid()}").write_text(str(info.world_size))
    info.restart_count = max(restarts, earlier) + requeues
    info.is_elastic = (scratch / NODES_FILE).exists()
    if info.single_node and not external:  # a new store for each attempt: the old one holds the keys of dead ranks
        info.store = f"{scratch}/store-{restarts}-{os.environ['MASTER_PORT']}"
    folder = _handshake(info, json.loads(argument), scratch / RUN_FOLDER_FILE) if external else argument
    run_and_exit(RunFolder(folder), info)


def _handshake(info: RankInfo, handshake: dict[str, Any], joined: Path) -> str:
    """Check that all ranks have rank 0's command and see its run folder.

    Args:
        info: of this rank.
        handshake: the command of this rank (``overrides``), ``local_world_size``, ``timeout_s`` and, on rank 0,
            ``folder``.
        joined: file in which the launcher finds the folder, or why this rank was refused.

    Returns:
        The run folder. If the ranks do not agree or do not meet, the process ends.
    """
    if info.world_size > 1:
        from torch.distributed import PrefixStore

        try:
            store = make_store(info, timedelta(seconds=handshake["timeout_s"]))
            if info.rank == 0:
                holder = read_holder(Path(handshake["folder"], LOCK))
                rank0 = {**handshake, "secret": holder.secret if holder else ""}
                store.set("exp/first", json.dumps(rank0))  # noqa: TID251 - plain strings
            rank0, wrong = _read_rank0(store, info.rank, handshake)
            # An outer torchrun keeps its store when it restarts the ranks: each attempt has keys of its own.
            attempt_store = PrefixStore(rank0["secret"], store)
            attempt_store.set(f"exp/wrong/{info.rank}", wrong)
            if info.rank == 0:
                every = [attempt_store.get(f"exp/wrong/{rank}").decode() for rank in range(info.world_size)]
                store.delete_key("exp/first")
                attempt_store.set("exp/refused", next(filter(None, every), ""))
            refused = attempt_store.get("exp/refused").decode()
        except (RuntimeError, OSError) as error:  # there is no log yet; the launcher shows what this process prints
            os.write(_STDERR, f"{type(error).__name__}: {error_message(error)}\n".encode())
            os._exit(EXIT_FAILED)
        if refused:
            write_json(joined, {"refused": refused})
            time.sleep(_READ_WITHIN_S)  # rank 0 may serve the store, which the others still have to read
            os._exit(EXIT_CONFIG)
        info.stores.append(attempt_store)
        handshake = rank0
    write_json(joined, {"folder": handshake["folder"]})
    return str(handshake["folder"])


def _read_rank0(store: Any, rank: int, handshake: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What rank 0 knows of the run, and how the command or folder of this rank differs from it; empty: not at all."""
    here, deadline = f"rank {rank} ({socket.gethostname()})", time.monotonic() + _NFS_TIMEOUT_S
    while True:
        rank0 = json.loads(store.get("exp/first"))  # again in each turn: it may be left of an earlier attempt
        if handshake["overrides"] != rank0["overrides"]:
            local, remote = {*handshake["overrides"]}, {*rank0["overrides"]}
            more, fewer = (" ".join(sorted(words)) or "nothing" for words in (local - remote, remote - local))
            return rank0, f"{here} has another command than rank 0: {more} instead of {fewer}; start all with the same"
        here_of, there_of = handshake["local_world_size"], rank0["local_world_size"]
        if here_of != there_of:
            return (
                rank0,
                f"{here} is one of {here_of} on its node, rank 0 one of {there_of}; start as many on each node",
            )
        holder = read_holder(Path(rank0["folder"], LOCK))
        if holder is not None and holder.secret == rank0["secret"]:
            return rank0, ""
        if time.monotonic() > deadline:
            what = "set output_dir=<a folder that all nodes share>"
            return rank0, f"{here} does not see rank 0's run folder {rank0['folder']}; {what}"
        time.sleep(0.1)


class _NoTerminal(io.TextIOBase):
    """Stdin of a worker: says why there is nothing to read, instead of an end of file (``breakpoint()``, ``input()``).

    In a loader process, Python has replaced it by an empty file.
    """

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        """Raise RunError."""
        frames = [frame for frame in traceback.extract_stack() if is_user_file(frame.filename)]
        raise no_terminal(f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else "")

    read = readline


def _leave(info: RankInfo) -> NoReturn:
    """End a worker of a job whose nodes come and go, so that the ranks that are left can form anew."""
    Path(os.environ[SCRATCH_VARIABLE], f"{LEAVING_FLAG}-{os.getpid()}").touch()
    _exit(EXIT_OK, info)


def run_and_exit(folder: RunFolder, info: RankInfo) -> NoReturn:
    """Run the worker, and end this process. Reports to the launcher go into the job's scratch folder.

    Args:
        folder: the run folder.
        info: of this rank.
    """
    scratch, pid = os.environ[SCRATCH_VARIABLE], os.getpid()
    try:
        with reporting(folder, info, redirect=True):
            heartbeat.start(scratch, info.local_rank, info.rank)
            set_socket_folder(scratch)
            sys.stdin = _NoTerminal()
            faulthandler.enable(_STDERR)
            session.run_rank(folder, info)
    except Preempted as preempted:
        # The exit code stays 0: torch's agent restarts on any other code.
        if not info.is_elastic or Path(scratch, PREEMPT_FLAG).exists():  # this node leaves
            write_json(Path(scratch, PREEMPTED_FILE), {"step": preempted.step})
        if info.is_elastic:
            _leave(info)
    except BaseException as error:  # noqa: BLE001 - the log and the error file have it
        if os.getpid() != pid:  # forked by user code
            os._exit(EXIT_FAILED)
        if is_caused_by_peer(error, info.world_size):
            if info.is_elastic:
                _leave(info)
            time.sleep(Patience.PEER_LOST_S)
        _exit(error.exit_code if isinstance(error, ExpError) else EXIT_FAILED, info)
    heartbeat.report_stage(Stage.DONE)
    _exit(EXIT_OK, info)


def _exit(code: int, info: RankInfo) -> NoReturn:
    """Run the clean-up of the device (:attr:`RankInfo.exit_handlers`), and exit without the interpreter's own clean-up.

    After a failure the interpreter's clean-up can wait for ranks that will never answer. After success, native threads
    of autograd and gloo race with it, although everything is written and the process group is destroyed: on torch 2.13
    about one in ten two-rank runs died of "terminate called without an active exception" (pytorch pull request 180701).

    The device's clean-up runs in this thread, which has selected the device. Its time limit does not need the
    interpreter lock, because a driver may hang while it holds the lock. The error file or the last heartbeat has
    already reported how the run ended, so errors of the clean-up change nothing.
    """
    patience = Patience.CLEAN_UP_S if code == EXIT_OK else Patience.CLEAN_UP_FAILED_S
    faulthandler.dump_traceback_later(patience, exit=True, file=_STDERR)
    for action in info.exit_handlers:
        try:
            action()
        except BaseException:  # noqa: BLE001 - a vendor's library may raise anything; the run is over
            os.write(_STDERR, f"clean-up failed\n{traceback.format_exc()}".encode())
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
