"""The user's own code: whose code raised an error, and where; a class that is not what exp asks for. Imports no torch.

It is read from the error's traceback, so that nothing is kept for it beforehand. Code of the user's is what is neither
exp's nor of Python, torch or MMEngine; of packages that are installed, only the members of classes that exp or MMEngine
call, such as models.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any, Iterator

from exp.errors import ConfigError, ExpError, SampleError, as_ours

__all__ = [
    "EXPERIMENT_PAGE", "TASK_PAGE", "asked", "first_line", "frames_of", "is_of_user", "is_own", "made", "message_of",
    "owner_of", "page_of", "place_of", "shown", "told",
]  # fmt: skip

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
    frames = traceback.extract_tb(error.__traceback__)
    return "".join(traceback.format_list([frame for frame in frames if owner_of(frame.filename) == "user"]))


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
    for file, line, function in reversed(_FRAME.findall(str(error)) if _is_of_loader(str(error)) else []):
        if owner_of(file) == "user":
            return Path(file).name, int(line), f"data: {Path(file).stem}.{function}"
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    own = [each for each in frames if owner_of(each[0].f_code.co_filename) == "user"]
    # A package that is installed counts where nothing else does, and only what a configuration names.
    others = [each for each in frames if owner_of(each[0].f_code.co_filename) == "package" and _member(each[0])]
    for frame, line in own[:1] or others[:1]:
        member = next(filter(None, (_member(each) for each, _ in own)), None) or _member(frame)
        function = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
        return Path(frame.f_code.co_filename).name, line, member or function
    return None


def _member(frame: Any) -> str | None:
    """``model: mine.Net.forward``, where a frame is of an object that a configuration names."""
    code = frame.f_code
    thing = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    cls = thing if inspect.isclass(thing) else type(thing)
    kind = next(filter(None, (_KINDS.get(f"{base.__module__}.{base.__qualname__}") for base in cls.__mro__)), None)
    return kind and f"{kind}: {shown(cls)}" + ("(...)" if code.co_name == "__init__" else f".{code.co_name}")


def owner_of(file: str) -> str | None:
    """``user``, or ``package``: one that is installed; None: exp's, Python's, torch's or MMEngine's."""
    installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    roots = [f"{Path(str(sys.modules[name].__file__)).parent}/" for name in _BELOW if name in sys.modules]
    if not installed:  # packages that are installed lie below Python's own modules, often
        roots += [f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")]
    return None if file.startswith(("<", *roots)) else "package" if installed else "user"


def _is_of_loader(text: str) -> bool:
    return re.match(r"Caught \w+ in DataLoader worker process", text) is not None


EXPERIMENT_PAGE = "docs/tutorial/add-an-experiment.md"
TASK_PAGE = "docs/extend/add-a-task.md"


def is_own(thing: Any) -> bool:
    """Whether a class, or that of an object, is exp's own."""
    return shown(thing).partition(".")[0] == "exp"


def page_of(key: str) -> str:
    """The page that describes the interface of a key, such as ``metrics[0]``."""
    group = re.split(r"[.\[]", key)[0]
    pages = dict.fromkeys(("launcher", "logger", "task", "wrapper"), TASK_PAGE)
    return "docs/extend/add-a-backend.md" if group == "backend" else pages.get(group, EXPERIMENT_PAGE)


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
