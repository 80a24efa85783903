"""Checkpoints in the background: what is written is the state as it was, and nothing that goes wrong is lost."""

from __future__ import annotations

import errno
import resource
import threading

import pytest
import torch
from exp.backends.cpu import CpuBackend

from exp.engine import checkpoint
from exp.engine.checkpoint_writer import CheckpointWriter
from exp.engine.optim import BackendOptimWrapper


@pytest.mark.parametrize("with_weights", [False, True])
def test_what_is_written_is_the_state_at_the_call_while_training_goes_on(tmp_path, with_weights):
    backend = CpuBackend(name="cpu")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    wrapper = BackendOptimWrapper(torch.optim.Adam(model.parameters(), lr=0.1), backend)
    writer, path, go_on = CheckpointWriter(backend), tmp_path / "a.pth", threading.Event()

    def step():
        wrapper.update_params(model(torch.randn(8, 4)).square().sum())

    def state():
        return {"state_dict": model.state_dict(), "optimizer": wrapper.state_dict()}

    def late(*arguments):
        assert go_on.wait(60)
        checkpoint.write(*arguments)

    step()
    for _ in range(2):  # the second into the memory of the first
        before = checkpoint.plain(state(), lambda tensor: tensor.detach().clone())
        go_on.clear()
        writer.start({path: state()}, wrapper, with_weights, write=late)
        for _ in range(3):
            step()
        go_on.set()
        writer.wait()
        written = checkpoint.read(path)
        assert written["optimizer"]["param_groups"] == before["optimizer"].pop("param_groups")
        del written["optimizer"]["param_groups"]
        torch.testing.assert_close(written, before, rtol=0, atol=0)


def test_tensors_that_files_and_names_share_are_copied_once(tmp_path):
    writer, shared, got = CheckpointWriter(CpuBackend(name="cpu")), torch.ones(3), {}
    contents = {tmp_path / "a": {"x": shared, "tied": shared}, tmp_path / "b": {"x": shared, "other": torch.ones(3)}}
    writer.start(contents, write=lambda path, content: got.update({path.name: content}))
    writer.wait()
    assert got["a"]["x"] is got["a"]["tied"] is got["b"]["x"] is not got["b"]["other"]


def test_what_the_disk_says_is_raised_once_where_training_is(tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = CheckpointWriter(CpuBackend(name="cpu"))
    for then in (writer.wait, lambda: writer.start({tmp_path / "b.pth": {}})):
        writer.start({tmp_path / "a.pth": {}}, write=full)
        with pytest.raises(OSError, match="No space left"):
            then()
        writer.wait()
        writer.check()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_outgrows_the_disk_leaves_the_former_one(tmp_path):
    path = tmp_path / "a.pth"
    checkpoint.write(path, {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpoint.write(path, {"step": 2, "weights": torch.zeros(2**16)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [each.name for each in tmp_path.iterdir()] == ["a.pth"]
    assert checkpoint.read(path) == {"step": 1}


def test_a_copy_of_mapped_weights_is_what_the_file_holds(tmp_path):
    path = tmp_path / "a.pth"
    checkpoint.write(path, {"state_dict": {"a": torch.arange(5.0)}})
    mapped = checkpoint.read(path, mapped=True)["state_dict"]["a"]
    path.unlink()
    mapped += 1  # of this process alone
    assert mapped.tolist() == [1, 2, 3, 4, 5]
