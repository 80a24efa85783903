"""Simulated GCU cards: a package ``torch_gcu`` over host memory, for machines that have no card.

Importing this module changes nothing. Only :func:`activate` puts the simulated ``torch_gcu`` before any other one, in
this process and its child processes, so a simulated card cannot be mistaken for a real one.

Two generations, chosen by the version of the installed torch: ``current`` (torch >= 2.5, device type ``gcu``) and
``legacy`` (torch 1.10, device type ``xla``).
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib import metadata
from pathlib import Path

__all__ = ["activate", "device_count", "device_type", "generation", "path", "total_count"]

_HERE = Path(__file__).parent


def generation() -> str:
    """``current`` or ``legacy``, by the version of the installed torch (which is not imported).

    Raises:
        RuntimeError: torch is missing, or there is no simulated card for its version.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise RuntimeError(f"simulated gcu: torch is not installed for {sys.executable}; install it first") from None
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) == (1, 10):
        return "legacy"
    if (major, minor) >= (2, 5):
        return "current"
    raise RuntimeError(f"simulated gcu: there is none for torch {version}; use torch 1.10, or 2.5 and later")


def device_type() -> str:
    """Torch's device type of the cards: ``gcu``, or what ``SIM_GCU_DEVICE`` says, for tests of other vendors' files."""
    return os.environ.get("SIM_GCU_DEVICE") or "gcu"


def path() -> Path:
    """The folder that holds the simulated ``torch_gcu``, to be put on ``sys.path`` or ``PYTHONPATH``."""
    return _HERE / generation()


def total_count() -> int:
    """Number of cards of the machine: ``SIM_GCU_COUNT``, 8 by default.

    Raises:
        RuntimeError: the variable is not a number.
    """
    text = os.environ.get("SIM_GCU_COUNT") or "8"
    if not text.isdigit():
        raise RuntimeError(f"simulated gcu: SIM_GCU_COUNT={text} is no number of cards")
    return int(text)


def device_count() -> int:
    """Number of cards that a process would see: :func:`total_count` without those that ``TOPS_VISIBLE_DEVICES`` hides.

    Raises:
        RuntimeError: see :func:`total_count` and :func:`generation`.
    """
    generation()
    total = total_count()
    visible = os.environ.get("TOPS_VISIBLE_DEVICES")
    if visible is None:
        return total
    count = 0
    for item in visible.split(","):
        if not item.strip().isdigit() or int(item) >= total:
            break  # as in the drivers: the list ends at the first entry that is not a card
        count += 1
    return count


def activate() -> None:
    """Make ``import torch_gcu`` and ``libefml.so.1`` the simulated ones, in this process and its child processes.

    The library exists for the current generation only, after it has been compiled (:mod:`simulated_gcu.build`).

    Raises:
        RuntimeError: another ``torch_gcu`` has been imported already.
    """
    folder = str(path())
    loaded = sys.modules.get("torch_gcu")
    if loaded is not None and not str(getattr(loaded, "__file__", "")).startswith(folder):
        raise RuntimeError(f"simulated gcu: {loaded.__file__} has been imported already; it cannot be replaced")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    _put_first("PYTHONPATH", folder)
    from simulated_gcu.build import cached_library

    library = cached_library()
    if library is not None and library.is_file():
        _put_first("LD_LIBRARY_PATH", str(library.parent))
        ctypes.CDLL(str(library))  # the loader has read the variable already, but finds loaded libraries by name


def _put_first(variable: str, folder: str) -> None:
    inherited = [part for part in os.environ.get(variable, "").split(os.pathsep) if part and part != folder]
    os.environ[variable] = os.pathsep.join([folder, *inherited])
