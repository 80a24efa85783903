"""exp: the same PyTorch experiments, unchanged, on different accelerators."""

from __future__ import annotations

import os
import sys

# ``python -m`` puts the current folder first in sys.path, so that any file there can hide an installed package. Modules
# that the configuration names are found there without this entry (:func:`exp.config.resolve.find_user_module`). While
# Python looks for the module to run, sys.argv[0] is "-m"; sys.orig_argv, since Python 3.10, has the module's name.
_COMMAND = getattr(sys, "orig_argv", ["-m", "exp"])
if (
    sys.argv[:1] == ["-m"]
    and any(option == "-m" and name.split(".")[0] == "exp" for option, name in zip(_COMMAND, _COMMAND[1:]))
    and not getattr(sys.flags, "safe_path", False)
    and sys.path[0] != os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120 - pathlib is not loaded yet
):
    del sys.path[0]

from typing import TYPE_CHECKING, Any  # noqa: E402 - a file of this name could hide it, too

if TYPE_CHECKING:
    from exp.api import open_run, open_sweep, run

__version__ = "0.1.0"
__all__ = ["open_run", "open_sweep", "run"]


def __getattr__(name: str) -> Any:
    """Import a public function when it is used for the first time; the command line needs none of them."""
    if name in __all__:
        from exp import api

        return getattr(api, name)
    raise AttributeError(f"module 'exp' has no attribute {name!r}; public are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
