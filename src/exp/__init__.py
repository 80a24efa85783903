"""exp: the same PyTorch experiments, unchanged, on different accelerators."""

from __future__ import annotations

import os
import sys

# ``python -m`` puts the current folder before all others, where a file of any name stands in for an installed package.
# What the configuration names of it is found all the same (:func:`exp.config.resolve.find_own_module`). While Python
# looks for the module to run, the program is called "-m"; whose module it is, Python 3.10 and later say.
_COMMAND = getattr(sys, "orig_argv", ["-m", "exp"])
if (
    sys.argv[:1] == ["-m"]
    and any(option == "-m" and name.split(".")[0] == "exp" for option, name in zip(_COMMAND, _COMMAND[1:]))
    and not getattr(sys.flags, "safe_path", False)
    and sys.path[0] != os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120 - pathlib is not loaded yet
):
    del sys.path[0]

from typing import TYPE_CHECKING, Any, Sequence  # noqa: E402 - a file of this name could stand in for it, too

if TYPE_CHECKING:
    import pandas as pd

    from exp.api import OpenRun

__version__ = "0.1.0"
__all__ = ["open_run", "open_sweep", "run"]

# Imported when they are called: the command line needs none of it.


def open_run(path: str | os.PathLike[str]) -> OpenRun:
    """A run folder; see :func:`exp.api.open_run`."""
    from exp import api

    return api.open_run(path)


def open_sweep(path: str | os.PathLike[str], average_seeds: bool = False) -> pd.DataFrame:
    """The runs of a sweep, the best first; see :func:`exp.api.open_sweep`."""
    from exp import api

    return api.open_sweep(path, average_seeds)


def run(overrides: Sequence[str] = ()) -> Any:
    """Start what ``python -m exp <overrides>`` starts, and wait for its end; see :func:`exp.api.run`."""
    from exp import api

    return api.run(overrides)
