"""Files of checkpoints: ours, those of other tools, and what is none; and how they are written beside the training."""

from __future__ import annotations

import errno
import io
import os
import pickle
import signal
import threading
from argparse import Namespace
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from exp.backends.cpu import CpuBackend
from mmengine.config import ConfigDict

from exp.distributed import Distributed
from exp.engine.checkpoint import writer as writer_module
from exp.engine.checkpoint.policy import prune_checkpoints, remove_leftovers
from exp.engine.checkpoint.reader import list_checkpoints, load_pickle, read_checkpoint
from exp.engine.checkpoint.writer import CheckpointWriter, plain_copy, write_checkpoint
from exp.engine.optim import BackendOptimWrapper
from exp.engine.weights import find_state_dict
from exp.errors import CheckpointError


def test_plain_data_comes_back_the_same_and_other_data_are_refused(tmp_path):
    tensors = {"state_dict": dict(torch.nn.Linear(3, 2).state_dict()), "rng": [torch.get_rng_state()]}
    meta = {"step": np.int64(7), "lr": np.float64(0.5), "name": "x", "none": None, "betas": (0.9, 0.99)}
    write_checkpoint(tmp_path / "step_7.pth", {**tensors, "meta": meta})
    with pytest.raises(TypeError, match=r"_thread\.lock"):
        write_checkpoint(tmp_path / "other.pth", {"lock": threading.Lock()})
    read = read_checkpoint(tmp_path / "step_7.pth")
    assert repr(read.pop("meta")) == "{'step': 7, 'lr': 0.5, 'name': 'x', 'none': None, 'betas': (0.9, 0.99)}"
    torch.testing.assert_close(read, tensors, rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["step_7.pth"], "a temporary file was left behind"


def test_no_flipped_bit_changes_what_is_read(tmp_path):
    path, content = tmp_path / "step_1.pth", {"state_dict": {"a": torch.arange(8.0)}, "meta": {"step": 3}}
    write_checkpoint(path, content)
    whole = path.read_bytes()
    taken = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            read = read_checkpoint(path)
        except CheckpointError:
            continue
        taken += 1
        torch.testing.assert_close(read, content, rtol=0, atol=0)
    assert taken <= 9  # of the mark before the digest: such a file has none


@pytest.mark.parametrize("write", [torch.save, pickle.dump])
def test_a_refusal_names_the_culprit_and_advises_nothing_unsafe(tmp_path, write):
    """That no code of such a file runs: tests/behaviour/test_trust.py."""
    path = tmp_path / "module.pth"
    with path.open("wb") as file:
        write(torch.nn.Sequential(torch.nn.Linear(1, 1)), file)
    with pytest.raises(CheckpointError, match=r"names torch\.nn\.modules\.") as error:
        read_checkpoint(path)
    assert "weights_only" not in f"{error.value}{error.value.__cause__}"
    with pytest.raises(pickle.UnpicklingError, match="exec"):
        load_pickle(io.BytesIO(pickle.dumps(exec)))  # as the index of shards is read


def test_settings_beside_the_weights_and_files_older_than_zip_are_read(tmp_path):
    beside = {"args": Namespace(lr=1.0, out=Path("x")), "cfg": ConfigDict(a=[{"b": 1}]), "n": np.float64(3)}
    content = {"model": {"module.a": torch.arange(3.0)}, "counts": defaultdict(list, {"a": [1]}), **beside}
    for new in (True, False):
        torch.save(content, str(tmp_path / "w.pth"), _use_new_zipfile_serialization=new)
        state = find_state_dict(read_checkpoint(tmp_path / "w.pth"))
        assert {key: value.tolist() for key, value in state.items()} == {"a": [0, 1, 2]}


W = torch.ones(1)


@pytest.mark.parametrize(
    "content",
    [{"a.b": W}, {"_orig_mod.module.a.b": W}, {"module._orig_mod.a._checkpoint_wrapped_module.b": W},
     {"model": {"a.b": W}, "optimizer": {"lr": 1}}, {"student": {"c": W}, "teacher": {"a.b": W}},
     {"model": {"teacher": {"module.a.b": W}, "epoch": 1}}, {"state_dict": {"a.b": W}, "model": {"name": "x"}}],
)  # fmt: skip
def test_every_form_of_state_dict_is_found(content):
    assert list(find_state_dict(content)) == ["a.b"]


@pytest.mark.parametrize(("owner", "name", "left"), [(os, "fsync", 1), (Path, "replace", 1), (Path, "unlink", 2)])
def test_a_writer_that_is_killed_leaves_a_checkpoint_that_opens_and_nothing_half_there(tmp_path, owner, name, left):
    """While it writes, before the file has its name, and before the former one goes."""
    paths = [tmp_path / f"step_{step:08d}.pth" for step in (1, 2)]
    write_checkpoint(paths[0], {"step": 1})
    pid = os.fork()
    if not pid:
        setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        try:
            write_checkpoint(paths[1], {"step": 2})
            prune_checkpoints(tmp_path, 1)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == paths[:left]
    assert read_checkpoint(list_checkpoints(tmp_path)[0]) == {"step": left}


def test_what_is_written_is_the_state_at_the_call_while_training_goes_on(tmp_path, monkeypatch):
    backend = CpuBackend(name="cpu")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    wrapper = BackendOptimWrapper(torch.optim.Adam(model.parameters(), lr=0.1), backend)
    writer, path, go_on = CheckpointWriter(backend, Distributed()), tmp_path / "a.pth", threading.Event()
    write = write_checkpoint

    def steps(count):
        for _ in range(count):
            wrapper.update_params(model(torch.randn(8, 4)).square().sum())

    def state():
        return {"state_dict": model.state_dict(), "optimizer": wrapper.state_dict()["state"]}

    def late(*arguments):
        assert go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(writer_module, "write_checkpoint", late)
    steps(1)
    for _ in range(2):  # the second into the memory of the first
        before = plain_copy(state(), lambda tensor: tensor.detach().clone())
        go_on.clear()
        writer.start({path: state()})
        steps(3)
        go_on.set()
        writer.wait()
        torch.testing.assert_close(read_checkpoint(path), before, rtol=0, atol=0)


def test_what_the_disk_says_is_raised_once_where_training_is(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer_module, "write_checkpoint", full)
    writer = CheckpointWriter(CpuBackend(name="cpu"), Distributed())
    for then in (writer.wait, lambda: writer.start({tmp_path / "b.pth": {}})):
        writer.start({tmp_path / "a.pth": {}})
        with pytest.raises(OSError, match="No space left"):
            then()
        writer.wait()
        writer.check()
    assert list(tmp_path.iterdir()) == []
