from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tests.behaviour.conftest import start, trained

__all__ = ["left_in", "start", "trained"]


def left_in(folder: Path) -> list[str]:
    """The processes that still work in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is a kernel's
            if os.readlink(entry / "cwd") == str(folder):
                found.append(entry.name)
    return found
