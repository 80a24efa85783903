"""Shows whether processes ended with the vendor's clean-up: without it, real processes died of SIGILL.

If ``SIM_GCU_EXIT_MARKS`` names a folder, every process writes a file with its process id there when it imports the
package, and removes it in the clean-up. Files that remain belong to processes that ended without the clean-up.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["mark", "unmark"]

_marked: dict[int, Path] = {}


def mark() -> None:
    """Write the file of this process."""
    folder = os.environ.get("SIM_GCU_EXIT_MARKS")
    if folder:
        path = _marked[os.getpid()] = Path(folder, f"{os.getpid()}.unclean")
        path.touch()


def unmark() -> None:
    """Remove the file of this process; a forked child does not remove that of its parent."""
    path = _marked.pop(os.getpid(), None)
    if path is not None and path.exists():
        path.unlink()
