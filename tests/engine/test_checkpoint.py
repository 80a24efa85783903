import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from exp.engine import checkpoint
from exp.errors import CheckpointError


def test_plain_data_comes_back_the_same(tmp_path):
    content = {
        "state_dict": torch.nn.Linear(3, 2).state_dict(),
        "meta": {"step": np.int64(7), "lr": np.float64(0.5), "name": "x", "none": None, "betas": (0.9, 0.99)},
        "rng": [torch.get_rng_state()],
    }
    checkpoint.write(tmp_path / "step_7.pth", content)
    read = checkpoint.read(tmp_path / "step_7.pth")
    assert read["meta"] == {"step": 7, "lr": 0.5, "name": "x", "none": None, "betas": (0.9, 0.99)}
    assert torch.equal(read["rng"][0], content["rng"][0])
    for key, value in content["state_dict"].items():
        assert torch.equal(read["state_dict"][key], value)
    assert [path.name for path in tmp_path.iterdir()] == ["step_7.pth"], "a temporary file was left behind"


def test_an_optimizer_state_comes_back_the_same(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint.write(tmp_path / "a.pth", optimizer.state_dict())
    read = checkpoint.read(tmp_path / "a.pth")
    fresh = torch.optim.Adam(model.parameters(), lr=0.2)
    fresh.load_state_dict(read)
    assert fresh.param_groups[0]["lr"] == 0.1
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


class _Bomb:
    def __reduce__(self):
        return (os.system, ("touch /tmp/exp-test-bomb-went-off",))


def test_a_file_that_would_run_code_is_refused(tmp_path):
    path = tmp_path / "bomb.pth"
    torch.save({"state_dict": {}, "x": _Bomb()}, str(path))
    with pytest.raises(CheckpointError, match="cannot read the checkpoint"):
        checkpoint.read(path)
    assert not Path("/tmp/exp-test-bomb-went-off").exists()


def test_a_pickle_in_the_oldest_format_is_refused(tmp_path):
    path = tmp_path / "old.pth"
    path.write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(CheckpointError):
        checkpoint.read(path)
    assert not Path("/tmp/exp-test-bomb-went-off").exists()


def test_what_is_not_plain_is_refused_when_written(tmp_path):
    with pytest.raises(TypeError, match=r"_thread\.lock"):
        checkpoint.write(tmp_path / "a.pth", {"lock": threading.Lock()})
    assert list(tmp_path.iterdir()) == []


def test_safetensors_are_read(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.arange(3.0)}, str(tmp_path / "w.safetensors"))
    assert checkpoint.weights_of(checkpoint.read(tmp_path / "w.safetensors"))["a"].tolist() == [0, 1, 2]


def test_the_newest_that_opens_is_taken_and_the_damaged_named(tmp_path):
    for step in (1, 2, 10):
        checkpoint.write(tmp_path / f"step_{step:08d}.pth", {"step": step})
    damaged = tmp_path / "step_00000010.pth"
    damaged.write_bytes(damaged.read_bytes()[:100])
    path, content, skipped = checkpoint.newest_that_opens(tmp_path)
    assert path.name == "step_00000002.pth"
    assert content == {"step": 2}
    assert len(skipped) == 1
    assert "step_00000010.pth" in skipped[0]
    checkpoint.prune(tmp_path, keep=2)
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step_00000010.pth", "step_00000002.pth"]


def test_stale_temporaries_are_removed(tmp_path):
    (tmp_path / ".step_00000001.pth.123.tmp").write_bytes(b"half")
    checkpoint.remove_stale_temporaries(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*nothing\.pth"):
        checkpoint.read(tmp_path / "nothing.pth")
