"""exp: the same PyTorch experiments, unchanged, on different accelerators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
