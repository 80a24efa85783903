"""Weights by name on a cluster whose nodes have disks of their own."""

from __future__ import annotations

import hashlib

import pytest
from safetensors.torch import save

from exp.vision.dinov3 import SceneClassifier
from tests.behaviour.conftest import SCENES
from tests.behaviour.hub import Hub

pytest.importorskip("huggingface_hub")


def test_each_node_fetches_once_and_all_use_the_same_commit(cluster, submit, result):
    model = SceneClassifier(num_classes=10, size="vits16", embed_dim=16, depth=2, num_heads=2)
    weights = save({name: value.clone() for name, value in model.backbone.state_dict().items()})
    hub = Hub()
    hub.repositories = {"owner/small": {"model.safetensors": weights}}
    try:
        environment = hub.environment(cluster.scratch)
        submit("launcher.nodes=2", "nproc=2", "init_from=hf:owner/small", small=SCENES, **environment).end()
    finally:
        hub.close()
    assert [device["host"] for device in result()["devices"]] == ["n1", "n1", "n2", "n2"]
    assert result()["weights"]["files"] == {"model.safetensors": hashlib.sha256(weights).hexdigest()}
    fetched = [file for file, _ in hub.gets]
    assert fetched == ["model.safetensors"] * 3, "where it is submitted, and once on each node"
    assert result()["world_size"] == 4
