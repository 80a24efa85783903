"""Whether a process ended with the vendor's clean-up: real ones without it have died of SIGILL.

Where ``SIM_GCU_EXIT_MARKS`` names a folder, every process leaves a file with its number there when it imports the
package, and takes it away in the clean-up. What remains is of processes that ended without.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["mark", "unmark"]

_marked: dict[int, Path] = {}


def mark() -> None:
    """Leave the file of this process."""
    folder = os.environ.get("SIM_GCU_EXIT_MARKS")
    if folder:
        path = _marked[os.getpid()] = Path(folder, f"{os.getpid()}.unclean")
        path.touch()


def unmark() -> None:
    """Take it away; a forked child leaves its parent's."""
    path = _marked.pop(os.getpid(), None)
    if path is not None and path.exists():
        path.unlink()
