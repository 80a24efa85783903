"""The user's own code: whose code raised an error, and where; a class that is not what exp asks for. Imports no torch.

It is read from the error's traceback, so that nothing is kept for it beforehand. Code of the user's is what is neither
exp's nor of Python, torch or MMEngine; of packages that are installed, only the members of classes that exp or MMEngine
call, such as models.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any, Iterator, Sequence

from exp.errors import ConfigError, ExpError, RunError, SampleError, as_ours

__all__ = [
    "EXPERIMENT_PAGE",
    "TASK_PAGE",
    "asked",
    "check_result",
    "first_line",
    "frames_of",
    "is_of_user",
    "is_own",
    "made",
    "message_of",
    "page_of",
    "place_of",
    "shown",
    "told",
]

_KINDS = {
    "exp.hardware.backend.Backend": "backend",
    "exp.data.base.Data": "data",
    "exp.engine.wrapper.Wrapper": "wrapper",
    "exp.launcher.base.Launcher": "launcher",
    "exp.metrics.Metric": "metric",
    "exp.task.Task": "task",
    "mmengine.hooks.hook.Hook": "hooks",
    "torch.nn.modules.module.Module": "model",
    "torch.optim.optimizer.Optimizer": "optim",
    "torch.utils.data.dataset.Dataset": "data",
}
"""What an object is in a configuration, by a class that it inherits."""

_BELOW = ("exp", "exp.backends", "torch", "mmengine")
_NATIVE = re.compile(r"\n?(?:Exception raised from |C\+\+ CapturedTraceback:)")  # torch's frames of C++ follow
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')


def shown(thing: Any) -> str:
    """The dotted path of a class, or of an object's class; of a function its own."""
    named = thing if inspect.isclass(thing) or inspect.isroutine(thing) else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def message_of(error: BaseException) -> str:
    """What an error says; of one that a loader process hands on, what the original says."""
    text = _NATIVE.split(str(error))[0].rstrip()
    if _is_of_loader(text):
        # torch puts its own words and a traceback in front
        return text.rpartition(f"{type(error).__name__}: ")[2].strip()
    return text


def first_line(error: BaseException) -> str:
    """The first line of what a library's error says, without the quotes that Python puts around a KeyError's."""
    said = str(error.args[0] if error.args else error).splitlines()
    return said[0] if said else str(error)


def is_of_user(error: BaseException) -> bool:
    """Whether an error may be one of the user's code: none of exp's, of the machine or of a device's memory."""
    return isinstance(error, Exception) and not (
        isinstance(error, ExpError) or as_ours(error) is not None or "out of memory" in str(error)
    )


def place_of(error: BaseException) -> str:
    """Where in the user's code: `` (file.py, line n)``, its innermost line; empty where there is none of it."""
    found = _innermost(error)
    return f" ({found[0]}, line {found[1]})" if found else ""


def frames_of(error: BaseException) -> str:
    """The traceback of an error, of the user's code alone."""
    roots = _roots()
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _is_users(frame.filename, roots) and not _is_installed(frame.filename)
    ]
    return "".join(traceback.format_list(frames))


def told(error: BaseException) -> str | None:
    """An error as one line that begins with whose it is, and ends with the place; further lines are its own.

    Such as ``model: mine.Net.forward raises RuntimeError: boom (mine.py, line 7)``.

    Args:
        error: as it was caught.

    Returns:
        None where the user's code is not to be seen in it, or it is no error of that.
    """
    found = _innermost(error) if is_of_user(error) else None
    if found is None:
        return None
    file, line, owner = found
    said, *more = f"{type(error).__name__}: {message_of(error).strip()}".splitlines()
    return "\n".join([f"{owner} raises {said} ({file}, line {line})", *more])


def _innermost(error: BaseException) -> tuple[str, int, str] | None:
    """Of the user's code: the file's name, the line, and whose it is."""
    roots = _roots()
    for file, line, function in reversed(_FRAME.findall(str(error)) if _is_of_loader(str(error)) else []):
        if _is_users(file, roots) and not _is_installed(file):
            return Path(file).name, int(line), f"data: {Path(file).stem}.{function}"
    frames = [_Frame(*each) for each in reversed(list(traceback.walk_tb(error.__traceback__)))]
    users = [each for each in frames if _is_users(each.file, roots)]
    own = [each for each in users if not _is_installed(each.file)]
    # A package that is installed counts where nothing else does, and only what a configuration names.
    for innermost in own[:1] or [each for each in users if each.member][:1]:
        member = next((each.member for each in own if each.member), innermost.member)
        return Path(innermost.file).name, innermost.line, member or innermost.function
    return None


class _Frame:
    def __init__(self, frame: Any, line: int) -> None:
        code = frame.f_code
        self.file, self.line = code.co_filename, line
        self.function = f"{frame.f_globals.get('__name__')}.{code.co_name}"
        thing = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        cls = thing if inspect.isclass(thing) else type(thing)
        kinds = (_KINDS.get(f"{base.__module__}.{base.__qualname__}") for base in cls.__mro__)
        kind = next(filter(None, kinds), None)
        self.member = kind and f"{kind}: {shown(cls)}" + ("(...)" if code.co_name == "__init__" else f".{code.co_name}")
        """Of an object that a configuration names."""


def _is_users(file: str, roots: Sequence[str]) -> bool:
    standard = not _is_installed(file) and file.startswith(tuple(_standard()))
    return not standard and not file.startswith(("<", *roots))


def _is_installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _roots() -> list[str]:
    """Folders of packages whose code is no user's."""
    return [f"{Path(str(sys.modules[name].__file__)).parent}/" for name in _BELOW if name in sys.modules]


@functools.lru_cache(maxsize=None)
def _standard() -> list[str]:
    """Folders of Python's own modules; packages that are installed lie below them, often."""
    return [f"{Path(path)}/" for name in ("stdlib", "platstdlib") for path in [sysconfig.get_paths()[name]]]


def _is_of_loader(text: str) -> bool:
    return re.match(r"Caught \w+ in DataLoader worker process", text) is not None


EXPERIMENT_PAGE = "docs/tutorial/add-an-experiment.md"
TASK_PAGE = "docs/extend/add-a-task.md"
_PAGES = {
    "backend": "docs/extend/add-a-backend.md",
    "launcher": TASK_PAGE,
    "logger": TASK_PAGE,
    "task": TASK_PAGE,
    "wrapper": TASK_PAGE,
}
_RECORD = ("status", "metrics", "measured_on", "steps", "wall_s")
"""What is told of every run that has ended; the rest of :func:`exp.runs.record.blank_result` may be missing."""


def is_own(thing: Any) -> bool:
    """Whether a class, or that of an object, is exp's own."""
    return shown(thing).partition(".")[0] == "exp"


def page_of(key: str) -> str:
    """The page that describes the interface of a key, such as ``metrics[0]``."""
    return _PAGES.get(re.split(r"[.\[]", key)[0], EXPERIMENT_PAGE)


def made(cls: Any, key: str, *arguments: Any, **keywords: Any) -> Any:
    """An object of a class, or what a function gives, named in a configuration.

    Args:
        cls: the class.
        key: that names it, such as ``model`` or ``metrics[0]``.
        *arguments: for it.
        **keywords: likewise.

    Raises:
        ConfigError: its constructor does not take these arguments, or members are missing that its interface asks for,
            or it raises; what that of a class of exp's own raises comes as it is.
    """
    if is_own(cls):
        try:
            inspect.signature(cls).bind(*arguments, **keywords)
        except TypeError as error:
            raise ConfigError(f"{key}: {shown(cls)}: {error}") from error
        return cls(*arguments, **keywords)
    with asked(key, cls, "(...)"):
        return cls(*arguments, **keywords)


def check_result(task: Any, result: Any) -> None:
    """Whether what a task gives is the record of a run.

    Args:
        task: that gave it.
        result: what its ``run`` gave.

    Raises:
        RunError: it cannot.
    """
    lacking = [key for key in _RECORD if not isinstance(result, dict) or key not in result]
    if lacking:
        raise RunError(
            f"task: {shown(task)}.run must give the content of result.json, as exp.engine.building.make_result makes "
            f"it, but what it gives lacks {', '.join(lacking)}; see {TASK_PAGE}"
        )


@contextlib.contextmanager
def asked(kind: str, owner: Any, call: str) -> Iterator[None]:
    """Whatever a member raises before a run has begun becomes one line, with the place in the user's code.

    Args:
        kind: the key that names the object, such as ``metric``.
        owner: the object; or its class, or a function that makes it.
        call: of the member, as it is called, with a dot in front; of a constructor ``(...)``.

    Raises:
        ConfigError: it raised; but errors of exp, of the machine and of a device's memory come as they are.
    """
    try:
        yield
    except SampleError as error:  # says all of this
        raise ConfigError(f"{message_of(error)}; see {page_of(kind)}") from error
    except Exception as error:  # a member may raise anything
        if not is_of_user(error):
            raise
        said = f"{type(error).__name__}: {message_of(error).strip()}".splitlines()[0]
        raise ConfigError(
            f"{kind}: {shown(owner)}{call} raises {said}{place_of(error)}; see {page_of(kind)}"
        ) from error
