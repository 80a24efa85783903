"""Names of weights, and files of weights in parts."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from exp.engine.weights import read_weights
from exp.errors import CheckpointError, ConfigError
from exp.hub.files import parse


def test_names():
    names = {
        "timm:a.b@v1": ("hf", "timm/a.b", "v1"), "hf:o/n": ("hf", "o/n", "main"),
        "hf:o/n@refs/pr/1": ("hf", "o/n", "refs/pr/1"), "ms:o/n": ("ms", "o/n", "master"),
    }  # fmt: skip
    assert {text: parse(text)[1:] for text in names} == names
    for text in ("hf:", "hf:o/n@", "timm:a/b", "hf:o/n/x", "hf:o n/x", "hf:n", "ms:n", "hf:../x", "hf:o/n@../x"):
        with pytest.raises(ConfigError, match=text):
            parse(text)


def test_a_folder_with_one_file_and_a_repository_in_a_cache(tmp_path):
    folder = tmp_path / "models--owner--name"
    for commit, value in (("c1", 1.0), ("c2", 2.0)):
        (folder / "snapshots" / commit).mkdir(parents=True)
        torch.save({"a": torch.tensor(value)}, folder / "snapshots" / commit / "pytorch_model.bin")
    assert read_weights(folder / "snapshots" / "c1").state["a"] == 1.0
    with pytest.raises(ConfigError, match=r"several commits.*snapshots/c1, .*snapshots/c2"):
        read_weights(folder)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c2")
    assert read_weights(folder).path == folder / "snapshots" / "c2" / "pytorch_model.bin"
    shutil.rmtree(folder / "snapshots" / "c2")
    assert read_weights(folder).state["a"] == 1.0, "the only commit"
    torch.save({"a": torch.ones(1)}, folder / "snapshots" / "c1" / "other.pth")
    with pytest.raises(ConfigError, match=r"several weights.*\n.*other.pth, pytorch_model.bin"):
        read_weights(folder)
    with pytest.raises(ConfigError, match="no checkpoint"):
        read_weights(tmp_path)


def test_a_folder_of_parts(tmp_path):
    parts = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    for name, file in parts.items():
        save_file({name: torch.ones(2)}, str(tmp_path / file))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    assert sorted(read_weights(tmp_path).state) == ["a", "b"]
    (tmp_path / parts["b"]).unlink()
    with pytest.raises(CheckpointError, match="model-2-of-2"):
        read_weights(tmp_path)
    for weight_map in ({}, {"a": "../model.safetensors"}, {"a": "model.bin"}):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=index.name):
            read_weights(tmp_path)
