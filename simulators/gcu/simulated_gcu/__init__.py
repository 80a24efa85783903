"""Simulated GCU cards: a package ``torch_gcu`` over host memory, for machines that have no card.

Importing this module changes nothing. :func:`activate` puts the simulated ``torch_gcu`` before any other one, in this
process and in those that it starts; nothing else ever does, so a simulated card cannot be mistaken for a real one.

Two generations, chosen by the version of the installed torch: ``current`` (torch >= 2.5, device type ``gcu``) and
``legacy`` (torch 1.10, device type ``xla``).
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

__all__ = ["activate", "device_count", "generation", "path"]

_HERE = Path(__file__).parent


def generation() -> str:
    """``current`` or ``legacy``, whichever goes with the installed torch (which is not imported).

    Raises:
        RuntimeError: torch is missing, or of a version for which there is no simulated card.
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


def path() -> Path:
    """The folder that holds the simulated ``torch_gcu``, to be put on ``sys.path`` or ``PYTHONPATH``."""
    return _HERE / generation()


def device_count() -> int:
    """Cards that a process would see: ``SIM_GCU_COUNT`` (8), less what ``TOPS_VISIBLE_DEVICES`` hides."""
    total = int(os.environ.get("SIM_GCU_COUNT") or 8)
    visible = os.environ.get("TOPS_VISIBLE_DEVICES")
    if visible is None:
        return total
    count = 0
    for item in visible.split(","):
        if not item.strip().isdigit() or int(item) >= total:
            break  # as the drivers read it: the list ends at the first entry that is no card
        count += 1
    return count


def activate() -> None:
    """Make ``import torch_gcu`` give the simulated one, here and in child processes.

    Raises:
        RuntimeError: another ``torch_gcu`` has been imported already.
    """
    folder = str(path())
    loaded = sys.modules.get("torch_gcu")
    if loaded is not None and not str(getattr(loaded, "__file__", "")).startswith(folder):
        raise RuntimeError(f"simulated gcu: {loaded.__file__} has been imported already; it cannot be replaced")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != folder]
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *inherited])
