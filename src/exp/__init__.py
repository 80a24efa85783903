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

from typing import TYPE_CHECKING, Any  # noqa: E402 - a file of this name could stand in for it, too

if TYPE_CHECKING:
    from exp.api import open_run, open_sweep, run

__version__ = "0.1.0"
__all__ = ["open_run", "open_sweep", "run"]


def __getattr__(name: str) -> Any:
    """What is public is imported when it is asked for: the command line needs none of it."""
    if name in __all__:
        from exp import api

        return getattr(api, name)
    raise AttributeError(f"module 'exp' has no attribute {name!r}; public are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
