"""The log of a rank, and its error file."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator

from exp.errors import Preempted, as_exp_error, error_message, user_error_lines, user_location
from exp.runs.failures import Failures, RankFailure, is_caused_by_peer, is_time_out
from exp.runs.scratch import ENDING_FLAG, SCRATCH_VARIABLE

if TYPE_CHECKING:
    from exp.runs.folder import RunFolder
    from exp.session import RankInfo

__all__ = ["describe_error", "reporting"]

_STDERR = 2  # file descriptor


@contextlib.contextmanager
def reporting(folder: RunFolder, info: RankInfo, redirect: bool) -> Iterator[None]:
    """Context in which a rank runs: log records go to the rank's log, an error to the log and the error file.

    Args:
        folder: the run folder.
        info: of this rank.
        redirect: send stderr and stdout to the log of the rank, except what Python prints to stdout on rank 0, which
            goes to the terminal.

    Raises:
        BaseException: the error of the run, unchanged; ``SystemExit`` counts as a failure, too.
    """
    log, process = folder.log_file(info.rank), os.getpid()
    handler: logging.Handler = logging.NullHandler()
    try:
        folder.error_file(info.rank).unlink(missing_ok=True)
        if redirect:
            _redirect(log, keep_stdout=info.rank == 0)
        logging.raiseExceptions = False  # on a full disk the run itself raises a clear error
        handler = logging.FileHandler(log, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.INFO)
        logging.captureWarnings(True)
        yield
    except Preempted as preempted:
        logging.getLogger(__name__).info("%s", preempted)
        raise
    except BaseException as error:  # a library that calls sys.exit must not end a run silently
        if os.getpid() != process:  # user code has forked it; nothing has happened to the rank
            raise
        if not isinstance(error, (Exception, SystemExit)) and (not redirect or _is_ending()):  # a signal ends the run
            raise
        logging.getLogger(__name__).error("rank %d failed\n%s", info.rank, traceback.format_exc())
        handler.close()  # the error may be that too many files are open
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


def _is_ending() -> bool:
    """Whether the launcher of this job ends it, and has interrupted its workers."""
    return Path(os.environ[SCRATCH_VARIABLE], ENDING_FLAG).exists()


def describe_error(error: BaseException, folder: RunFolder, info: RankInfo) -> RankFailure:
    """The failure of this rank, as its error file records it."""
    exp_error, caused_by_peer = as_exp_error(error, folder.path), is_caused_by_peer(error, info.world_size)
    ranks: Any = {"rank": info.rank, "local_rank": info.local_rank, "pid": os.getpid()}
    peer: Any = {"caused_by_peer": caused_by_peer, "timed_out": caused_by_peer and is_time_out(error)}
    if exp_error is not None:
        return RankFailure.of(exp_error, **ranks, **peer)
    lines = None if caused_by_peer else user_error_lines(error)
    if not isinstance(error, Exception):
        ending = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else "raised"
        lines = [f"{ending} before the work was done{user_location(error)}"]
    finding, *details = lines or error_message(error).splitlines() or ["no message"]
    names_type = isinstance(error, SystemExit) or (lines is not None and isinstance(error, Exception))
    return RankFailure(
        type=type(error).__name__, finding=finding, details=details, names_type=names_type, **ranks, **peer
    )


def _redirect(log: Path, keep_stdout: bool) -> None:
    """Point the file descriptors at the log, so that native code writes there too.

    With ``keep_stdout`` Python's ``sys.stdout`` keeps the terminal. Native libraries print to the log: gloo prints a
    line per peer, vendors' libraries their versions.
    """
    descriptor = os.open(str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, _STDERR)
    if keep_stdout:
        terminal = sys.stdout
        sys.stdout = open(os.dup(1), "w", buffering=1, encoding=terminal.encoding, errors=terminal.errors)  # noqa: PTH123, SIM115
    os.dup2(descriptor, 1)
    os.close(descriptor)
