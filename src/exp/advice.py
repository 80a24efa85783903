"""Commands that are printed for the user to copy: they work as they stand."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from omegaconf import OmegaConf

from exp import console
from exp.task import task_class

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.runs.folder import RunFolder

__all__ = ["remember", "to_continue", "to_continue_sweep"]

_given: list[str] = []
"""Arguments of the command line, where this is its process."""


def remember(arguments: Sequence[str]) -> None:
    """Keep what the user has typed: among it may be options of Hydra's, which are in no configuration."""
    _given[:] = arguments


def to_continue(config: ExpConfig, folder: RunFolder, *changes: str) -> str | None:
    """The command that continues a run.

    Args:
        config: of the run.
        folder: the run folder.
        *changes: overrides that it is to go on with, in place of those given.

    Returns:
        None where nothing is saved, or the task cannot go on.
    """
    if not task_class(config).saves_state or not folder.has_checkpoint():
        return None
    arguments = _given
    if not _given or {"-m", "--multirun"} & set(_given):
        written = folder.in_use(folder.overrides)
        if not written.is_file():
            return None
        content: Any = OmegaConf.to_container(OmegaConf.load(written))
        arguments = [str(override) for override in content]
    new = {"output_dir": console.shown(folder.path), "resume": "auto", **dict(each.split("=", 1) for each in changes)}
    return _command(arguments, (*new, "overwrite"), [f"{key}={value}" for key, value in new.items()])


def to_continue_sweep(folder: Path) -> str | None:
    """The command that does what is left of a sweep; None outside its process."""
    if not _given:
        return None
    new = [f"output_dir={console.shown(folder)}", "sweep.resume=true"]
    return _command(_given, ("sweep.resume", "output_dir"), new)


def _command(arguments: Sequence[str], without: Sequence[str], new: Sequence[str]) -> str:
    kept = [word for word in arguments if word.lstrip("+").partition("=")[0] not in without]
    program = ["exp"] if Path(sys.argv[0]).name == "exp" else ["python", "-m", "exp"]
    return " ".join(map(shlex.quote, [*program, *kept, *new]))
