"""The exceptions of ``exp``, one type for each way in which a caller can react; and messages for errors of user code.

Every message starts with one line that says what is wrong, where, and what to do; details may follow on later lines
(:class:`ExpError`). The exit codes are those of the command line (see docs/concepts/run.md).

The traceback of an error shows whose code raised it. User code is all code that is neither exp nor installed.
"""

from __future__ import annotations

import bdb
import contextlib
import difflib
import errno
import inspect
import os
import re
import signal
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any, Iterable, Iterator

from exp.console import error as print_error

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_UNAVAILABLE = 3
EXIT_PREEMPTED = 75

REFUSAL_CODES = (EXIT_CONFIG, EXIT_UNAVAILABLE)
"""Exit codes of a run that was refused before it began; it leaves no folder."""


class ExpError(Exception):
    """Base class; the command line exits with ``exit_code``.

    An error carries its parts as data, and ``str(error)`` formats them, only there: ``<finding>; <advice>``, then a
    line for each detail. Code that needs one part reads the attribute; no code takes a message apart.

    Args:
        finding: what is wrong, and where, in one line.
        advice: what to do; empty: nothing, or the finding says it.
        details: further lines, without indentation.
        key: the key of the configuration that is wrong, in full, such as ``data.root``.
        file: the file or folder that is wrong.
        rank: the rank at which something failed.
        signal: name of the signal that ended a process, such as ``SIGKILL``.
    """

    exit_code = EXIT_FAILED

    def __init__(
        self,
        finding: str,
        advice: str = "",
        details: Iterable[str] = (),
        *,
        key: str | None = None,
        file: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        signal: str | None = None,
    ) -> None:
        super().__init__(finding)
        self.finding, self.advice, self.details = finding, advice, [*details]
        self.key, self.file, self.rank, self.signal = key, file, rank, signal

    @property
    def headline(self) -> str:
        """Finding and advice: the message without its details."""
        return "; ".join(filter(None, (self.finding, self.advice)))

    def __str__(self) -> str:
        return "\n  ".join([self.headline, *self.details])


class ConfigError(ExpError):
    """The configuration or the usage is wrong: correct the command line (exit code 2)."""

    exit_code = EXIT_CONFIG


class DataError(ConfigError):
    """A data file is missing or malformed: correct the file or ``data.*`` (exit code 2)."""


class UnavailableError(ExpError):
    """The hardware, the scheduler or a dependency is not available (exit code 3)."""

    exit_code = EXIT_UNAVAILABLE


class RunError(ExpError):
    """The run itself failed (exit code 1)."""


class SampleError(RunError):
    """A sample cannot be loaded, or samples cannot form a batch; a ConfigError if no step was done yet."""


class Preempted(ExpError):  # noqa: N818 - not an error
    """The run was asked to end, and its state is saved; ``resume=auto`` continues it (exit code 75).

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


class SignalReceived(KeyboardInterrupt):
    """A signal arrived while no launcher handled signals. Code that catches KeyboardInterrupt catches it, too.

    This is a class of its own because of Python: once a plain KeyboardInterrupt has passed through an ``exec`` of
    text, as in the definition of a dataclass, Python ends by SIGINT, whatever the exit code.

    Args:
        number: number of the signal.
    """

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = number
        # SIGUSR2 announces preemption (exp.runs.job).
        self.exit_code = EXIT_PREEMPTED if number == signal.SIGUSR2 else 128 + number

    def report(self) -> int:
        """Report on stderr which signal ended the command; return the exit code (docs/concepts/run.md)."""
        print_error(f"interrupted by {signal.Signals(self.number).name}")
        return self.exit_code


_UNUSABLE_PATH = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip


def as_exp_error(error: BaseException, folder: Path | None = None, usage: bool = False) -> ExpError | None:
    """Translate an error of the system (memory, disk, permissions, libraries) into one of exp's.

    Args:
        error: any error.
        folder: path that was being written, for the message if the error names no file; None: unknown.
        usage: whether nothing had been started; then a path that cannot be used is a wrong argument (ConfigError).

    Returns:
        The error itself if it is one of exp's; None if it is not an error of the system.
    """
    if isinstance(error, ExpError):
        return error
    if isinstance(error, bdb.BdbQuit) and _LOADER_PREFIX.match(str(error)):
        return no_terminal()
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        return RunError(
            f"the machine's memory, or the limit on it, is exhausted ({error!r}); lower batch_size or "
            "data.num_workers, or raise the limit (ulimit -v, launcher.mem_gib)"
        )
    if _is_library_load_error(error):
        return UnavailableError(
            f"a library does not load: {first_line(error)}; is it installed, and is there enough memory for it "
            "(ulimit -v)?"
        )
    if not isinstance(error, OSError) or number is None:
        return None
    if number in (errno.EMFILE, errno.ENFILE):
        return RunError("too many files are open; raise the limit (ulimit -n), or lower data.num_workers")
    where = ": ".join(str(part) for part in (error.filename or folder, error.strerror) if part is not None)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RunError(f"cannot write {where}; free some space, or set output_dir, and continue with resume=auto")
    if number in _UNUSABLE_PATH or usage:
        kind = ConfigError if usage else RunError
        return kind(f"cannot use {where}; correct the path (such as output_dir), or its permissions")
    return None


def _is_library_load_error(error: BaseException) -> bool:
    """Whether a shared library does not load: ctypes raised the error, or the import of an extension module."""
    if isinstance(error, ImportError):
        return ".so" in str(error.path)
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, OSError) and error.errno is None and bool(frames) and "/ctypes/" in frames[-1]


_OUT_OF_MEMORY = re.compile(
    r"\w+ (driver )?error: out of memory|.*\bout of memory[.:] tried to allocate", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device is out of memory: torch's type for that, or on older torch its allocator's message."""
    if any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__):
        return True
    return (
        isinstance(error, RuntimeError) and not isinstance(error, ExpError) and bool(_OUT_OF_MEMORY.match(str(error)))
    )


def no_terminal(location: str = "") -> RunError:
    """The error of ``breakpoint()`` or ``input()`` in a process without a terminal; ``location``: `` (file, line)``."""
    return RunError(
        f"a breakpoint() or input(){location} needs a terminal, which worker and loader processes do not have; set "
        "nproc=1 data.num_workers=0 launcher.in_process=true"
    )


def nearest(wrong: str, names: Iterable[str], prefix: str = "") -> str:
    """``; did you mean 'x'?`` with the most similar of ``names``; empty if none is similar, which a guess must be.

    Parts before dots that both have do not count, nor does case; a part of a name is similar from four letters on.

    Args:
        wrong: what is not among the names.
        names: what is valid.
        prefix: text before the name, such as ``task=``.
    """
    best = max(names, key=lambda name: (_similarity(wrong, name), -len(name)), default="")
    return f"; did you mean '{prefix}{best}'?" if _similarity(wrong, best) >= _SIMILAR else ""


_SIMILAR = 0.75  # two of three letters are no similarity


def _similarity(wrong: str, name: str) -> float:
    parts, others = wrong.lower().split("."), name.lower().split(".")
    if others == parts[: len(others)] and len(others) < len(parts):
        return 0.0  # the section that was meant
    siblings = len(parts) == len(others) > 1 and parts[:-1] == others[:-1]
    while len(parts) > 1 and len(others) > 1 and parts[0] == others[0]:
        del parts[0], others[0]
    word, other = ".".join(parts), ".".join(others)
    shorter, longer = sorted((word, other), key=len)
    if siblings and len(word) == len(other) and sum(a != b for a, b in zip(word, other)) == 1:
        return 1.0 - 0.01 / len(word)  # a slip of one letter, also in a short key
    ratio = difflib.SequenceMatcher(None, word, other).ratio()
    return max(ratio, _SIMILAR) if len(shorter) > 3 and shorter in longer else ratio


_INTERFACES = {
    "Backend", "Data", "Dataset", "Hook", "Launcher", "Metric", "Model", "Module", "Optimizer", "Task", "Wrapper",
}  # fmt: skip
"""Base classes of what a configuration can name."""

_ARRAYS = {"Tensor", "Parameter", "ndarray"}
_MAX_SHAPES = 12
_FRAMEWORKS = ("exp", "exp.backends", "torch", "mmengine")
_LOADER_PREFIX = re.compile(r"Caught \w+ in DataLoader worker process")
_SHAPE_ERROR = re.compile(r"size of tensor|shape|sizes|dimension|batch_size|expanded size|out of range", re.IGNORECASE)
_CPP_TRACE = re.compile(r"\n?(?:Exception raised from |C\+\+ CapturedTraceback:)")  # torch appends its C++ frames


def qualified_name(value: Any) -> str:
    """The dotted path of a class or function; for any other object, that of its class."""
    definition = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
    return f"{definition.__module__}.{definition.__qualname__}"


def error_message(error: BaseException) -> str:
    """The text of an error; for an error that a loader process has passed on, the text of the original error."""
    text = _CPP_TRACE.split(str(error))[0].rstrip()
    if _LOADER_PREFIX.match(text):
        # torch puts a sentence and the traceback before the text
        return text.rpartition(f"{type(error).__name__}: ")[2].strip()
    return text


def typed_message(error: BaseException) -> str:
    """The name of the error's class, and its text; the first line alone is enough for a message of one line."""
    return f"{type(error).__name__}: {error_message(error).strip()}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without the quotes that Python puts around the text of a KeyError."""
    if isinstance(error, ExpError):
        return error.headline
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else error_message(error)
    return next(iter(text.strip().splitlines()), "")


def typed_line(error: BaseException) -> str:
    """The name of the error's class, and the first line of its text."""
    return f"{type(error).__name__}: {first_line(error)}"


def raised_by_user_code(error: BaseException) -> bool:
    """Whether user code may have raised an error: it is not exp's, the system's, or a device that is out of memory."""
    return isinstance(error, Exception) and as_exp_error(error) is None and not is_out_of_memory(error)


def user_location(error: BaseException) -> str:
    """The innermost line of user code in the traceback, as `` (file.py, line n)``; empty if there is none."""
    frame = _user_frame(error)
    return f" ({frame[0]}, line {frame[1]})" if frame else ""


def user_traceback(error: BaseException) -> str:
    """The traceback of an error, with the frames of user code only."""
    frames = traceback.extract_tb(error.__traceback__)
    return "".join(traceback.format_list([frame for frame in frames if is_user_file(frame.filename)]))


def format_user_error(error: BaseException) -> str | None:
    """The message for an error of user code: one line with owner, error and location, then further lines of the error.

    For example ``model: mine.Net.forward raises RuntimeError: boom (mine.py, line 7)``. If the error is about shapes,
    the line ends with those of the tensors there: ``; x (32, 96, 7), outputs (32, 48, 7)``.

    Args:
        error: any error.

    Returns:
        The message; None if user code did not raise the error, or is not in its traceback.
    """
    lines = user_error_lines(error)
    return None if lines is None else "\n".join(lines)


def user_error_lines(error: BaseException) -> list[str] | None:
    """The lines of :func:`format_user_error`."""
    frame = _user_frame(error) if raised_by_user_code(error) else None
    if frame is None:
        return None
    file, line, owner, tensors = frame
    headline, *details = typed_message(error).splitlines()
    shapes = f"; {', '.join(tensors)}" if tensors and is_about_shapes(error) else ""
    return [f"{owner} raises {headline} ({file}, line {line}){shapes}", *details]


def is_about_shapes(error: BaseException) -> bool:
    """Whether torch, NumPy or Python has raised an error because shapes or sizes do not fit."""
    return isinstance(error, (IndexError, RuntimeError, ValueError)) and bool(_SHAPE_ERROR.search(error_message(error)))


def _user_frame(error: BaseException) -> tuple[str, int, str, list[str]] | None:
    """The innermost frame of user code: file name, line, owner, such as ``model: mine.Net.forward``, and shapes there.

    Shapes are those of tensors and arrays in local variables, and in dicts such as a batch.
    """
    frames = [(f, line) for f, line in traceback.walk_tb(error.__traceback__) if is_user_file(f.f_code.co_filename)]
    if not frames:
        return None
    frame, line = frames[-1]
    method = next(filter(None, (_interface_method(f) for f, _ in reversed(frames))), None)
    function = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
    shapes = []
    for name, value in frame.f_locals.items():
        arrays = (
            {f"{name}[{key!r}]": array for key, array in value.items()} if isinstance(value, dict) else {name: value}
        )
        shapes += [f"{key} {tuple(array.shape)}" for key, array in arrays.items() if type(array).__name__ in _ARRAYS]
    return Path(frame.f_code.co_filename).name, line, method or function, shapes[:_MAX_SHAPES]


def _interface_method(frame: Any) -> str | None:
    """``model: mine.Net.forward`` for a frame in a method of a class with one of the interfaces; otherwise None."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None  # self or cls
    cls = owner if inspect.isclass(owner) else type(owner)
    kind = next((base.__name__.lower() for base in cls.__mro__ if base.__name__ in _INTERFACES), None)
    return kind and f"{kind}: {qualified_name(cls)}" + ("(...)" if code.co_name == "__init__" else f".{code.co_name}")


def is_user_file(file: str) -> bool:
    """Whether a source file is user code: it is not installed, and not of exp, Python, torch or MMEngine."""
    roots = [f"{Path(str(sys.modules[name].__file__)).parent}/" for name in _FRAMEWORKS if name in sys.modules]
    roots += [f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")]
    return {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts) and not file.startswith(("<", *roots))


EXPERIMENT_PAGE = "docs/tutorial/add-an-experiment.md"
"""The page that describes models, data and metrics."""


@contextlib.contextmanager
def user_code_errors(key: str, owner: Any) -> Iterator[None]:
    """Context for user code that is called before a run begins: its errors become one line that names the location.

    Args:
        key: configuration key of the object, such as ``metric``.
        owner: the object, its class, or a function that makes it.

    Raises:
        ConfigError: user code has raised an error. Errors of exp, of the system, and of a device that is out of memory
            are raised unchanged; but a SampleError becomes a ConfigError, too.
    """
    try:
        yield
    except SampleError as error:  # its text already names key and location
        raise ConfigError(error_message(error)) from error
    except Exception as error:  # user code may raise anything
        if not raised_by_user_code(error):
            raise
        lines = user_error_lines(error) or [f"{key}: {qualified_name(owner)} raises {typed_line(error)}"]
        raise ConfigError(lines[0], key=key) from error
