"""Files of checkpoints: ours, those of other tools, and what is none."""

from __future__ import annotations

import pickle
import threading
from argparse import Namespace
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict

from exp.engine import checkpoint
from exp.errors import CheckpointError


def test_plain_data_comes_back_the_same_and_other_data_are_refused(tmp_path):
    content = {
        "state_dict": torch.nn.Linear(3, 2).state_dict(),
        "meta": {"step": np.int64(7), "lr": np.float64(0.5), "name": "x", "none": None, "betas": (0.9, 0.99)},
        "rng": [torch.get_rng_state()],
    }
    checkpoint.write(tmp_path / "step_7.pth", content)
    with pytest.raises(TypeError, match=r"_thread\.lock"):
        checkpoint.write(tmp_path / "other.pth", {"lock": threading.Lock()})
    read = checkpoint.read(tmp_path / "step_7.pth")
    assert read["meta"] == {"step": 7, "lr": 0.5, "name": "x", "none": None, "betas": (0.9, 0.99)}
    assert type(read["meta"]["step"]) is int
    torch.testing.assert_close([read["rng"], read["state_dict"]], [content["rng"], dict(content["state_dict"])],
                               rtol=0, atol=0)  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["step_7.pth"], "a temporary file was left behind"


def test_no_flipped_bit_changes_what_is_read(tmp_path):
    path, content = tmp_path / "step_1.pth", {"state_dict": {"a": torch.arange(8.0)}, "meta": {"step": 3}}
    checkpoint.write(path, content)
    whole = path.read_bytes()
    taken = []
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            read = checkpoint.read(path)
        except CheckpointError:
            continue
        assert torch.equal(read["state_dict"]["a"], content["state_dict"]["a"])
        assert read["meta"] == content["meta"]
        taken.append(place)
    assert len(taken) <= 9  # of the mark before the digest: such a file has none


@pytest.mark.parametrize("write", [torch.save, pickle.dump])
def test_a_refusal_names_the_culprit_and_advises_nothing_unsafe(tmp_path, write):
    """That no code of such a file runs: tests/behaviour/test_trust.py."""
    path = tmp_path / "module.pth"
    with path.open("wb") as file:
        write(torch.nn.Sequential(torch.nn.Linear(1, 1)), file)
    with pytest.raises(CheckpointError, match=r"names torch\.nn\.modules\.") as error:
        checkpoint.read(path)
    assert "weights_only" not in f"{error.value}{error.value.__cause__}"


def test_a_checkpoint_of_mmengine_is_read(tmp_path):
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Tiny(BaseModel):
        def __init__(self):
            super().__init__()
            self.backbone = torch.nn.Linear(2, 2)

        def forward(self, inputs, mode="loss"):
            return {"loss": self.backbone(inputs).square().mean()}

    loader = torch.utils.data.DataLoader([{"inputs": torch.ones(2)}] * 4, batch_size=2)
    model = Tiny()
    runner = Runner(
        model, str(tmp_path), train_dataloader=loader, optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
        train_cfg={"by_epoch": True, "max_epochs": 1}, experiment_name="checkpoint", log_level="ERROR",
    )  # fmt: skip
    runner.message_hub.update_info("scale", np.float32(2))
    runner.message_hub.update_info("palette", np.zeros((2, 3), np.uint8))
    runner.train()
    content = checkpoint.read(tmp_path / "epoch_1.pth")
    assert content["meta"]["epoch"] == 1
    torch.testing.assert_close(checkpoint.weights_of(content), model.state_dict(), rtol=0, atol=0)
    assert type(content["message_hub"]["runtime_info"]["scale"]).__module__ != "numpy", "nothing of it is made anew"


def test_settings_beside_the_weights_and_files_older_than_zip_are_read(tmp_path):
    beside = {"args": Namespace(lr=1.0, out=Path("x")), "cfg": ConfigDict(a=[{"b": 1}]), "n": np.float64(3)}
    content = {"model": {"module.a": torch.arange(3.0)}, "counts": defaultdict(list, {"a": [1]}), **beside}
    for new in (True, False):
        torch.save(content, str(tmp_path / "w.pth"), _use_new_zipfile_serialization=new)
        state = checkpoint.weights_of(checkpoint.read(tmp_path / "w.pth"))
        assert {key: value.tolist() for key, value in state.items()} == {"a": [0, 1, 2]}


W = torch.ones(1)


@pytest.mark.parametrize(
    "content",
    [{"a.b": W}, {"_orig_mod.module.a.b": W}, {"module._orig_mod.a._checkpoint_wrapped_module.b": W},
     {"model": {"a.b": W}, "optimizer": {"lr": 1}}, {"student": {"c": W}, "teacher": {"a.b": W}},
     {"model": {"teacher": {"module.a.b": W}, "epoch": 1}}, {"state_dict": {"a.b": W}, "model": {"name": "x"}}],
)  # fmt: skip
def test_every_form_of_state_dict_is_found(content):
    assert list(checkpoint.weights_of(content)) == ["a.b"]


@pytest.mark.parametrize("content", [{}, {"state_dict": {}}, {"epoch": 1, "loss": 2.0}, [1]])
def test_no_state_dict_is_an_error_that_tells_what_is_there(content):
    with pytest.raises(CheckpointError, match=r"w\.pth") as error:
        checkpoint.weights_of(content, Path("w.pth"))
    assert "epoch" not in content or "epoch, loss" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"epoch 3, loss 0.2", b"\xff\xd8\xff\xe0JFIF"])
def test_a_file_that_is_no_checkpoint_is_called_so(tmp_path, content):
    path = tmp_path / "best.pth"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="it is empty" if content == b"" else "it is neither") as error:
        checkpoint.read(path)
    assert str(path) in str(error.value).splitlines()[0]


def test_pruning_keeps_what_was_written_or_read_and_never_everything_else_instead(tmp_path):
    """What is set aside takes the place of an earlier one: here, of the same step."""

    def names():
        return [path.name for path in checkpoint.list_checkpoints(tmp_path)]

    for step in (1, 2, 8, 10):
        checkpoint.write(tmp_path / f"step_{step:08d}.pth", {"step": step})
    checkpoint.prune(tmp_path, keep=2, known={"step_00000002.pth"})
    assert names() == ["step_00000010.pth", "step_00000002.pth"]
    checkpoint.prune(tmp_path, keep=0, known={"step_00000002.pth"})
    assert names() == ["step_00000002.pth"]
    (tmp_path / "set_aside").mkdir()
    (tmp_path / "set_aside" / "step_00000002.pth").write_bytes(b"of an earlier time")
    checkpoint.set_aside(checkpoint.list_checkpoints(tmp_path))
    assert names() == []
    assert checkpoint.read(tmp_path / "set_aside" / "step_00000002.pth") == {"step": 2}
