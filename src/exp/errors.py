"""The exceptions of ``exp``: few types, told apart by what the caller can do about them.

Every message starts with one line that says what is wrong, where, and what to do; details may follow on later lines.
The exit codes are those of the command line (see docs/concepts/run.md).
"""

from __future__ import annotations

import difflib
import errno
import signal
import sys
from typing import TYPE_CHECKING, Iterable

from exp.console import error as say

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "EXIT_CONFIG", "EXIT_FAILED", "EXIT_OK", "EXIT_PREEMPTED", "EXIT_UNAVAILABLE", "REFUSED", "CheckpointError",
    "ConfigError", "DataError", "Ended", "ExpError", "PlacementError", "Preempted", "RunError", "SampleError",
    "UnavailableError", "as_ours", "nearest",
]  # fmt: skip

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_UNAVAILABLE = 3
EXIT_PREEMPTED = 75

REFUSED = (EXIT_CONFIG, EXIT_UNAVAILABLE)
"""Exit codes of a run that has not begun: it leaves no folder."""


class ExpError(Exception):
    """Base class; ``exit_code`` is what the command line exits with."""

    exit_code = EXIT_FAILED


class ConfigError(ExpError):
    """The configuration or the usage is wrong: correct the command line (exit code 2)."""

    exit_code = EXIT_CONFIG


class DataError(ConfigError):
    """A data file is missing or malformed: correct the file or ``data.*`` (exit code 2)."""


class UnavailableError(ExpError):
    """The hardware, the scheduler or a dependency is not there (exit code 3)."""

    exit_code = EXIT_UNAVAILABLE


class RunError(ExpError):
    """The run itself failed (exit code 1)."""


class SampleError(RunError):
    """A sample of the user's data cannot be had, or samples make no batch; before the first step a ConfigError."""


class Preempted(ExpError):  # noqa: N818 - no error
    """The run was told to end, and its state is saved: ``resume=auto`` continues it (exit code 75).

    Args:
        step: optimizer steps completed.
    """

    exit_code = EXIT_PREEMPTED

    def __init__(self, step: int) -> None:
        super().__init__(f"preempted after step {step}")
        self.step = step


class PlacementError(RunError):
    """Parameters or buffers are not on the device of their rank."""


class CheckpointError(RunError):
    """A checkpoint cannot be read, or does not belong to this model."""


class Ended(KeyboardInterrupt):
    """A signal has come while no launcher listened: wherever Ctrl-C is heard, so is this.

    Not KeyboardInterrupt itself: once one has passed through an ``exec`` of text (that of a dataclass is enough),
    Python ends by SIGINT whatever exit code it is given.

    Args:
        number: of the signal.
        exit_code: of the command.
    """

    begun = False
    """Of the class: a run has begun; a sweep has where its module is imported."""

    def __init__(self, number: int, exit_code: int) -> None:
        super().__init__(number)
        self.number = number
        self.exit_code = exit_code

    def tell(self) -> int:
        """Say in one line that it has ended the command; returns the exit code (docs/concepts/run.md)."""
        begun = Ended.begun or "exp.sweep" in sys.modules
        lost = "" if begun else " before anything was begun; give the same command again"
        say("interrupted" if self.number == signal.SIGINT else f"ended by {signal.Signals(self.number).name}{lost}")
        return self.exit_code


_PLUGINS = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # torch's own message names it, but not what went wrong
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip


def as_ours(error: BaseException, folder: Path | None = None, usage: bool = False) -> ExpError | None:
    """The error as one of ours.

    Args:
        error: any.
        folder: what was being written where the error itself does not say.
        usage: whether it comes before anything has started: then a path that cannot be used is a wrong argument.

    Returns:
        None for an error that is not the machine's.
    """
    if isinstance(error, ExpError):
        return error
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        said = f" ({error})" if str(error) else ""
        return RunError(
            f"the machine's memory, or the limit on it, is exhausted{said}; lower batch_size or data.num_workers, or "
            "raise the limit (ulimit -v, launcher.mem_gib)"
        )
    if isinstance(error, (OSError, ImportError)) and ".so" in str(error) and getattr(error, "errno", None) is None:
        return UnavailableError(
            f"a library does not load: {str(error).splitlines()[0]}; is it installed, and is there enough memory for "
            "it (ulimit -v)?"
        )
    if isinstance(error, RuntimeError) and _PLUGINS in str(error):
        return UnavailableError(
            f"torch loads a device's plug-in, which fails: {error.__cause__ or error}; export {_PLUGINS}=0, or put the "
            "plug-in's runtime on LD_LIBRARY_PATH"
        )
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return RunError("too many files are open; raise the limit (ulimit -n), or lower data.num_workers")
    place = error.filename if error.filename is not None else folder
    where = f"{place}: {error.strerror}" if place is not None else str(error.strerror)
    if error.errno in _FULL:
        return RunError(f"cannot write {where}; make space, or set output_dir, and go on with resume=auto")
    if error.errno in _FORBIDDEN or usage:
        kind = ConfigError if usage else RunError
        return kind(f"cannot use {where}; correct the path (such as output_dir), or its permissions")
    return None


def nearest(wrong: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the closest of ``known``, or nothing where none is close."""
    matches = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{matches[0]}'?" if matches else ""
