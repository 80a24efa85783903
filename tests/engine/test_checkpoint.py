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


class _Bomb:
    def __reduce__(self):
        return (os.system, ("touch /tmp/exp-test-bomb-went-off",))


def test_a_refusal_names_the_culprit_and_advises_nothing_unsafe(tmp_path):
    path = tmp_path / "bomb.pth"
    torch.save({"state_dict": {"a": torch.ones(1)}, "message_hub": np.float64(1), "x": _Bomb()}, str(path))
    with pytest.raises(CheckpointError, match=r"it names (posix|nt)\.system, which is not plain data") as error:
        checkpoint.read(path)
    told, seen = [], error.value
    while seen is not None:
        told.append(str(seen))
        seen = seen.__cause__
    assert "weights_only" not in "".join(told)
    torch.save(torch.nn.Sequential(torch.nn.Linear(1, 1)), str(path))
    with pytest.raises(CheckpointError, match=r"names torch\.nn\.modules\.") as error:
        checkpoint.read(path)
    assert "weights_only" not in str(error.value)


@pytest.fixture(scope="module")
def of_mmengine(tmp_path_factory):
    """A checkpoint of MMEngine's own runner, and the weights in it."""
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Tiny(BaseModel):
        def __init__(self):
            super().__init__()
            self.backbone = torch.nn.Linear(2, 2)

        def forward(self, inputs, mode="loss"):
            return {"loss": self.backbone(inputs).square().mean()}

    folder = tmp_path_factory.mktemp("mmengine")
    loader = torch.utils.data.DataLoader([{"inputs": torch.ones(2)}] * 4, batch_size=2)
    model = Tiny()
    runner = Runner(
        model, str(folder), train_dataloader=loader, optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
        train_cfg={"by_epoch": True, "max_epochs": 1}, experiment_name="checkpoint", log_level="ERROR",
    )  # fmt: skip
    runner.message_hub.update_info("scale", np.float32(2))
    runner.message_hub.update_info("palette", np.zeros((2, 3), np.uint8))
    runner.train()
    return folder / "epoch_1.pth", {key: value.clone() for key, value in model.state_dict().items()}


def test_a_checkpoint_of_mmengine_is_read(of_mmengine):
    path, weights = of_mmengine
    content = checkpoint.read(path)
    assert {"meta", "state_dict", "message_hub", "optimizer"} <= set(content)
    assert content["meta"]["epoch"] == 1
    state = checkpoint.weights_of(content)
    assert list(state) == list(weights)
    for key, value in weights.items():
        assert torch.equal(state[key], value)
    assert type(content["message_hub"]["runtime_info"]["scale"]).__module__ != "numpy", "nothing of it is made anew"


def test_settings_beside_the_weights_are_read(tmp_path):
    from argparse import Namespace
    from collections import defaultdict

    from mmengine.config import ConfigDict

    beside = {"args": Namespace(lr=1.0, out=Path("x")), "cfg": ConfigDict(a=[{"b": 1}]), "n": np.float64(3)}
    beside["counts"] = defaultdict(list, {"a": [1]})
    torch.save({"model": {"module.a": torch.ones(2)}, **beside}, str(tmp_path / "w.pth"))
    state = checkpoint.weights_of(checkpoint.read(tmp_path / "w.pth"))
    assert {key: value.tolist() for key, value in state.items()} == {"a": [1, 1]}


def test_a_file_older_than_zip_is_read(tmp_path):
    torch.save({"state_dict": {"a": torch.arange(3.0)}}, str(tmp_path / "w.pth"), _use_new_zipfile_serialization=False)
    assert checkpoint.weights_of(checkpoint.read(tmp_path / "w.pth"))["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "content",
    [{"a.b": 0}, {"module.a.b": 0}, {"_orig_mod.module.a.b": 0}, {"module._orig_mod.a._checkpoint_wrapped_module.b": 0},
     {"model": {"a.b": 0}, "optimizer": {"lr": 1}}, {"student": {"c": 0}, "teacher": {"a.b": 0}},
     {"model": {"teacher": {"module.a.b": 0}, "epoch": 1}}, {"state_dict": {"a.b": 0}, "model": {"name": "x"}}],
)  # fmt: skip
def test_every_form_of_state_dict_is_found(content):
    def filled(node):
        if not isinstance(node, dict):
            return torch.ones(1) if node == 0 else node
        return {key: filled(value) for key, value in node.items()}

    assert list(checkpoint.weights_of(filled(content))) == ["a.b"]


@pytest.mark.parametrize("content", [{}, {"state_dict": {}}, {"epoch": 1, "loss": 2.0}, [1]])
def test_no_state_dict_is_an_error_that_tells_what_is_there(content):
    with pytest.raises(
        CheckpointError, match=r"w\.pth holds no state dict: expected tensors by name, or under one of"
    ) as error:
        checkpoint.weights_of(content, Path("w.pth"))
    assert "epoch" not in content or "it has the keys epoch, loss" in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "it is empty"), (b"epoch 3, loss 0.2", "it is neither"), (b"\xff\xd8\xff\xe0JFIF", "it is neither")],
)
def test_a_file_that_is_no_checkpoint_is_called_so(tmp_path, content, said):
    path = tmp_path / "best.pth"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        checkpoint.read(path)
    assert f"{path}: {said}" in str(error.value).splitlines()[0]


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


def test_pruning_keeps_what_was_written_or_read_and_never_everything_else_instead(tmp_path):
    for step in (1, 2, 8, 10):
        checkpoint.write(tmp_path / f"step_{step:08d}.pth", {"step": step})
    checkpoint.prune(tmp_path, keep=2, known={"step_00000002.pth"})
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step_00000010.pth", "step_00000002.pth"]
    checkpoint.prune(tmp_path, keep=0, known={"step_00000002.pth"})
    assert [p.name for p in checkpoint.list_checkpoints(tmp_path)] == ["step_00000002.pth"]
    (tmp_path / "set_aside").mkdir()
    (tmp_path / "set_aside" / "step_00000002.pth").write_bytes(b"of an earlier time")
    checkpoint.set_aside(checkpoint.list_checkpoints(tmp_path))
    assert checkpoint.list_checkpoints(tmp_path) == []
    assert checkpoint.read(tmp_path / "set_aside" / "step_00000002.pth") == {"step": 2}
