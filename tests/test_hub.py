"""Names of weights, and files of weights in parts."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from exp.engine.building import read_weights
from exp.errors import CheckpointError, ConfigError
from exp.hub import parse


def test_names():
    names = {"timm:a.b@v1": ("timm/a.b", "v1"), "hf:o/n": ("o/n", "main"), "hf:o/n@refs/pr/1": ("o/n", "refs/pr/1")}
    assert {text: parse(text)[1:] for text in names} == names
    for text in ("hf:", "hf:o/n@", "timm:a/b", "hf:o/n/x", "hf:o n/x", "hf:n", "hf:../x", "hf:o/n@../x"):
        with pytest.raises(ConfigError, match=text):
            parse(text)


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
