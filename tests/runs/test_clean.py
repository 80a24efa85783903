"""task=clean: what goes from a run folder, and what must stay."""

from __future__ import annotations

import pytest
import torch

from exp.engine.checkpoint.writer import write_checkpoint
from exp.errors import ConfigError
from exp.runs.clean import find_removable, remove
from exp.runs.folder import RunFolder
from exp.runs.lock import RunLock


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of four steps, of which the newest is cut off, the best, and leftovers."""
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    for step in (3, 6, 9, 12):
        write_checkpoint(folder.checkpoints / f"step_{step:08d}.pth", {"a": torch.ones(100)}, "0" * 32)
    write_checkpoint(folder.checkpoints / "best.pth", {"a": torch.ones(100)}, "0" * 32)
    newest = folder.checkpoints / "step_00000012.pth"
    newest.write_bytes(newest.read_bytes()[:-200])
    (folder.checkpoints / ".step_00000015.pth.tmp").write_bytes(b"1234")
    for shards in ("step_00000003.shards0", "step_00000009.shards0", "best.shards0"):
        (folder.checkpoints / shards).mkdir()
        (folder.checkpoints / shards / "0.distcp").write_bytes(b"12")
    (folder.checkpoints / "quarantine").mkdir()
    (folder.checkpoints / "quarantine" / "step_00000030.pth").write_bytes(b"1")
    return folder


def test_the_best_and_the_newest_whole_checkpoint_stay(folder):
    found = {each.path.name: each.size for each in find_removable(folder)}
    size = (folder.checkpoints / "step_00000003.pth").stat().st_size
    assert found == {
        "step_00000003.pth": size, "step_00000006.pth": size, "step_00000003.shards0": 2, ".step_00000015.pth.tmp": 4,
        "step_00000030.pth": 1,
    }  # fmt: skip
    remove(folder)
    assert {path.name for path in folder.checkpoints.iterdir()} == {
        "best.pth", "best.shards0", "step_00000009.pth", "step_00000009.shards0", "step_00000012.pth", "quarantine",
    }  # fmt: skip
    assert find_removable(folder) == []


def test_without_a_whole_checkpoint_none_goes(folder):
    for path in folder.checkpoints.glob("step_*.pth"):
        path.write_bytes(path.read_bytes()[:-200])
    assert [
        each for each in find_removable(folder) if each.path.suffix == ".pth" and "quarantine" not in each.path.parts
    ] == []


def test_a_folder_that_a_process_writes_is_left_alone(folder):
    lock = RunLock(folder.path)
    lock.acquire()
    try:
        with pytest.raises(ConfigError, match="run"):
            remove(folder)
    finally:
        lock.release()
    assert (folder.checkpoints / "step_00000003.pth").is_file()
