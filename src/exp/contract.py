"""What is said of a class of the user's own that is not what exp asks for: one line with the member, class and page.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from typing import Any, Iterator

from exp.errors import ConfigError, RunError, SampleError
from exp.raised import is_of_user, message_of, place_of, shown
from exp.runfolder import to_json

__all__ = [
    "EXPERIMENT_PAGE",
    "LOGGER_PAGE",
    "TASK_PAGE",
    "WRAPPER_PAGE",
    "asked",
    "check_result",
    "is_own",
    "made",
    "missing_members",
    "page_of",
    "shown",
]

EXPERIMENT_PAGE = "docs/add-an-experiment.md"
TASK_PAGE = "docs/add-a-task.md"
WRAPPER_PAGE = LOGGER_PAGE = "docs/add-a-wrapper.md"
_PAGES = {
    "backend": "docs/add-a-backend.md",
    "launcher": TASK_PAGE,
    "logger": LOGGER_PAGE,
    "task": TASK_PAGE,
    "wrapper": WRAPPER_PAGE,
}
_RECORD = ("status", "metrics", "measured_on", "steps", "wall_s")
"""What is told of every run that has ended; the rest of :func:`exp.result.blank_result` may be missing."""


def is_own(thing: Any) -> bool:
    """Whether a class, or that of an object, is exp's own."""
    return shown(thing).partition(".")[0] == "exp"


def missing_members(cls: Any) -> list[str]:
    """The members that a class has to have and has not, in order; it cannot be instantiated then."""
    return sorted(getattr(cls, "__abstractmethods__", ())) if inspect.isclass(cls) else []


def page_of(key: str) -> str:
    """The page that describes the interface of a key, such as ``metrics[0]``."""
    return _PAGES.get(re.split(r"[.\[]", key)[0], EXPERIMENT_PAGE)


def made(cls: Any, key: str, *arguments: Any, **keywords: Any) -> Any:
    """An object of a class, or what a function gives, named in a configuration.

    Args:
        cls: the class.
        key: that names it, such as ``model`` or ``metrics[0]``; empty: none does.
        *arguments: for it.
        **keywords: likewise.

    Raises:
        ConfigError: the class lacks members that its interface asks for, or its constructor raises; that of a class of
            exp's own raises what it likes.
    """
    page = page_of(key)
    key = key or "configuration"
    missing = missing_members(cls)
    if missing:
        owner = [each for each in cls.__mro__ if missing[0] in vars(each)][-1]
        names = ", ".join(f"{name}(...)" for name in missing)
        raise ConfigError(f"{key}: {shown(cls)} has no {names}, which {shown(owner)} asks for; see {page}")
    if is_own(cls):
        return cls(*arguments, **keywords)
    with asked(key, cls, "(...)", page):
        return cls(*arguments, **keywords)


def check_result(task: Any, result: Any) -> None:
    """Whether what a task gives can be written, and told, as the record of a run.

    Args:
        task: that gave it.
        result: what its ``run`` gave.

    Raises:
        RunError: it cannot.
    """
    lacking = [key for key in _RECORD if key not in result] if isinstance(result, dict) else ["dict"]
    trouble = f"lacks {', '.join(lacking)}" if isinstance(result, dict) else f"is a {type(result).__name__}"
    if not lacking:
        try:
            to_json(result)
            return
        except (TypeError, ValueError) as error:
            trouble = f"is no JSON: {error}"
    raise RunError(
        f"task: {shown(task)}.run must give the content of result.json, as exp.engine.building.make_result makes it, "
        f"but what it gives {trouble}; see {TASK_PAGE}"
    )


@contextlib.contextmanager
def asked(kind: str, owner: Any, call: str, page: str = EXPERIMENT_PAGE, inside: bool = True) -> Iterator[None]:
    """Whatever a member raises while the contract is checked becomes one line, with the place in the user's code.

    Args:
        kind: what the object is, such as ``metric``.
        owner: the object; or its class, or a function that makes it.
        call: of the member, as it is called, with a dot in front; of a constructor ``(...)``.
        page: where the contract stands.
        inside: whether that goes for errors of the member's own code, too, not only for how it is called.

    Raises:
        ConfigError: it raised; but errors of exp, of the machine and of a device's memory come as they are.
    """
    try:
        yield
    except SampleError as error:  # says all of this
        raise ConfigError(f"{message_of(error)}; see {page}") from error
    except Exception as error:  # a member may raise anything
        if not is_of_user(error) or (not inside and place_of(error)):
            raise
        said = f"{type(error).__name__}: {message_of(error).strip()}".splitlines()[0]
        raise ConfigError(f"{kind}: {shown(owner)}{call} raises {said}{place_of(error)}; see {page}") from error
