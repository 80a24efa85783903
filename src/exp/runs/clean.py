"""What may go from run folders: checkpoints that nothing continues from, and what killed processes left.

The best checkpoint stays, and so does the newest one that is whole: training can go on, and evaluation stays possible.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Iterator, NamedTuple

from exp.runs.files import NO_COMMENT, SEAL_BYTES, file_digest, read_seal
from exp.runs.folder import CHECKPOINT_NAME, QUARANTINE, RunFolder
from exp.runs.lock import RunLock


class Removable(NamedTuple):
    """A file or folder that may go.

    Attributes:
        path: of the file or folder.
        size: bytes, of all that it contains.
        reason: why it is of no use.
    """

    path: Path
    size: int
    reason: str


def find_removable(folder: RunFolder) -> list[Removable]:
    """What may go from a run folder that no process writes."""
    checkpoints = folder.checkpoints
    steps = [path for path in checkpoints.glob("step_*.pth") if CHECKPOINT_NAME.match(path.name)]
    steps.sort(key=lambda path: int(path.stem[len("step_") :]), reverse=True)
    newest = next(filter(_is_whole, steps), None)
    remaining = (
        steps[: steps.index(newest) + 1] if newest is not None else steps
    )  # also newer ones: someone may mend them
    removable = [(path, "older than the newest checkpoint") for path in steps if path not in remaining]
    names = {path.stem for path in remaining}
    removable += [
        (path, "shards of such a checkpoint")
        for path in checkpoints.glob("*.shards*")
        if path.name.partition(".")[0] not in names | {"best"}
    ]
    removable += [(path, "left by a process that was killed") for path in checkpoints.glob(".*.tmp")]
    removable += [(path, "no run continues from it") for path in checkpoints.glob(f"{QUARANTINE}/*")]
    return [Removable(path, sum(_sizes(path)), reason) for path, reason in sorted(removable)]


def remove(folder: RunFolder) -> list[Removable]:
    """Remove what :func:`find_removable` finds, and return it.

    Raises:
        ConfigError: a process writes the folder.
        OSError: something cannot be removed.
    """
    lock = RunLock(folder.path, key="run")
    lock.acquire()
    try:
        removed = find_removable(folder)
        for item in removed:
            if item.path.is_dir() and not item.path.is_symlink():
                shutil.rmtree(item.path)
            else:
                item.path.unlink()
    finally:
        lock.release()
    return removed


def _is_whole(path: Path) -> bool:
    """Whether the digest in a checkpoint of exp is that of its content; shards beside it are checked when read."""
    try:
        seal = read_seal(path)
        return seal is not None and file_digest(path, SEAL_BYTES, NO_COMMENT + seal.run_id.encode()) == seal.digest
    except OSError:
        return False


def _sizes(path: Path) -> Iterator[int]:
    for file in path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]:
        yield file.lstat().st_size
