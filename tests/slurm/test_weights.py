"""Weights by name on a cluster whose nodes have disks of their own."""

from __future__ import annotations

import hashlib
import json

import pytest
from safetensors.torch import save

from tests.hub.server import Hub
from tests.hub.small import SMALL, backbone

pytest.importorskip("huggingface_hub")


def test_each_node_fetches_once_and_all_use_the_same_commit(cluster, submit, result, tmp_path):
    weights = save(backbone())
    hub = Hub()
    hub.repositories = {"owner/small": {"model.safetensors": weights}}
    try:
        environment = hub.environment(cluster.scratch)
        job = submit("launcher.nodes=2", "nproc=2", "init_from=hf:owner/small", small=SMALL, **environment)
        code, said = job.end()
    finally:
        hub.close()
    assert code == 0, said
    assert [device["host"] for device in result("run")["devices"]] == ["n1", "n1", "n2", "n2"]
    assert result("run")["weights"]["files"] == {"model.safetensors": hashlib.sha256(weights).hexdigest()}
    fetched = [file for file, _ in hub.gets]
    assert fetched == ["model.safetensors"] * 3, "where it is submitted, and once on each node"
    assert json.loads((tmp_path / "run" / "result.json").read_text())["world_size"] == 4
