"""init_from=hf:... and timm:..., against a hub on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket

import pytest
import torch
from safetensors.torch import save

from exp.config.schema import ExpConfig
from exp.errors import ConfigError
from exp.hub import parse
from tests.conftest import Forked, clean_environment, read_strictly, run_exp
from tests.hub.server import COMMIT, Hub
from tests.hub.small import SMALL, backbone
from tests.terminal import on_a_terminal

pytest.importorskip("huggingface_hub")

CARD = b"---\nlicense: other\nlicense_name: open-earth-1\n---\n# Weights\nlicense: none\n"


@pytest.fixture(scope="module")
def weights():
    """Of :func:`tests.hub.small.backbone`, as a whole and in two parts."""
    return backbone()


@pytest.fixture
def hub(weights):
    hub = Hub()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    hub.repositories = {
        "timm/small_vit.sat493m": {"model.safetensors": save(weights), "README.md": CARD, "config.json": b"{}"},
        "owner/parts": {"model.safetensors.index.json": json.dumps(index).encode(),
                        **{file: save({name: weights[name] for name in held}) for file, held in parts.items()}},
        "owner/pickled": {"pytorch_model.bin": b"..."},
        "owner/gated": {"model.safetensors": save(weights)},
        "owner/convnext": {"model.safetensors": save({"stages.0.blocks.0.conv_dw.weight": torch.ones(1)})},
    }  # fmt: skip
    hub.gated.add("owner/gated")
    yield hub
    hub.close()


def first_line(done):
    return next(line for line in done.stderr.splitlines() if line.strip())


def test_fetched_once_recorded_and_used_without_a_network(tmp_path, hub, weights):
    environment = hub.environment(tmp_path / "cache")
    name = "init_from=timm:small_vit.sat493m"
    done = run_exp(tmp_path, *SMALL, name, "nproc=2", "output_dir=run", **environment)
    assert done.returncode == 0, done.stderr
    assert [path for path, _ in hub.gets].count("model.safetensors") == 1
    about = read_strictly((tmp_path / "run" / "result.json").read_text())["weights"]
    assert about == {
        "source": "timm:small_vit.sat493m",
        "repository": "timm/small_vit.sat493m",
        "commit": COMMIT,
        "files": {"model.safetensors": hashlib.sha256(save(weights)).hexdigest()},
        "licence": "open-earth-1",
        "endpoint": hub.url,
    }
    assert "timm/small_vit.sat493m at 01234567, licence: open-earth-1" in done.stdout
    trained = torch.load(str(tmp_path / "run" / "checkpoints" / "best.pth"), map_location="cpu")["state_dict"]
    assert torch.allclose(trained["pixel_mean"].flatten() / 255, torch.tensor([0.430, 0.411, 0.296])), "satellite"
    near = (trained["backbone.cls_token"] - weights["cls_token"]).abs().max()
    assert near < 1e-3, "one step from the weights of the hub"

    asked = len(hub.gets)
    hub.close()
    for number, more in enumerate(({}, {"HF_HUB_OFFLINE": "1"})):
        done = run_exp(tmp_path, *SMALL, name, f"output_dir=again{number}", **{**environment, **more})
        assert done.returncode == 0, done.stderr
    assert len(hub.gets) == asked
    assert f"cannot fetch it from {hub.url}" not in done.stderr


def test_a_download_that_is_killed_goes_on_where_it_was(tmp_path, hub, weights):
    weights = {**weights, "backbone.filler": torch.zeros(12 * 2**20 // 4)}
    hub.repositories["owner/large"] = {"model.safetensors": save(weights)}
    hub.cut = 11 * 2**20
    environment = hub.environment(tmp_path / "cache")
    command = [*SMALL, "init_from=hf:owner/large@main", "init_partial=true", "output_dir=run"]
    first = Forked(tmp_path, *command, new_session=True, **environment)
    assert hub.sent.wait(120)
    blobs = tmp_path / "cache" / "hub" / "models--owner--large" / "blobs"
    for _ in range(300):
        if sum(path.stat().st_size for path in blobs.glob("*.part")) >= 10 * 2**20:
            break
        first._process.join(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(60)
    assert not (tmp_path / "run").exists(), "nothing is written before the weights are there"
    hub.cut = None
    hub.released.set()
    done = run_exp(tmp_path, *command, **environment)
    assert done.returncode == 0, done.stderr
    ranges = [given for file, given in hub.gets if file == "model.safetensors"]
    assert ranges[0] is None
    assert int(ranges[-1].split("=")[1].split("-")[0]) >= 10 * 2**20
    about = read_strictly((tmp_path / "run" / "result.json").read_text())["weights"]
    assert about["files"]["model.safetensors"] == hashlib.sha256(save(weights)).hexdigest()
    assert about["licence"] is None


def test_a_terminal_sees_how_far_it_is(tmp_path, hub, weights):
    hub.repositories["owner/large"] = {"model.safetensors": save({**weights, "filler": torch.zeros(2**20)})}
    environment = hub.environment(tmp_path / "cache")
    code, drawn = on_a_terminal(tmp_path, *SMALL, "init_from=hf:owner/large", "output_dir=run", **environment)
    assert code == 0, drawn
    bars = [line for line in re.split(r"[\r\n]+", drawn) if line.startswith("fetching owner/large model.safetensors")]
    assert re.search(r"4\.\d/4\.\d MiB", bars[-1]), drawn


@pytest.mark.slow
def test_ranks_started_outside_fetch_once(tmp_path, hub):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**hub.environment(tmp_path / "cache"), **group}
    command = [*SMALL, "init_from=hf:owner/parts", "output_dir=run", "launcher=external"]
    ranks = [Forked(tmp_path, *command, **environment, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    said = [rank.communicate(200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    fetched = [file for file, _ in hub.gets]
    assert sorted(fetched) == sorted(set(fetched)), "in parts, and each once"
    assert len(fetched) == 3
    about = read_strictly((tmp_path / "run" / "result.json").read_text())["weights"]
    assert len(about["files"]) == 3


def test_what_goes_wrong_is_one_line_and_leaves_nothing(tmp_path, hub):
    environment = hub.environment(tmp_path / "cache")
    wrong = {
        "hf:owner/unknown": (2, f"there is no {hub.url}/owner/unknown, or it is private; check the name"),
        "hf:owner/parts@v9": (2, "has no revision v9"),
        "hf:owner/gated": (2, "is gated: accept its licence there and set HF_TOKEN"),
        "hf:owner/pickled": (2, "has no model.safetensors, nor model.safetensors.index.json (it has pytorch"),
        "hf:owner/convnext": (2, "holds a ConvNeXt, but the backbones here are vision transformers"),
        "hf:parts": (2, "is no name of weights; write hf:<owner>/<name>"),
        "hf:../../etc": (2, "is no name of weights"),
    }  # fmt: skip
    for name, (code, text) in wrong.items():
        done = run_exp(tmp_path, *SMALL, f"init_from={name}", "output_dir=run", **environment)
        assert done.returncode == code, (name, done.stderr)
        assert text in first_line(done), (name, done.stderr)
        assert not (tmp_path / "run").exists()
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    done = run_exp(tmp_path, *SMALL, "init_from=timm:small_vit.sat493m", "output_dir=run", **offline)
    assert done.returncode == 3
    assert "HF_HUB_OFFLINE is set, and the cache" in first_line(done)
    done = run_exp(
        tmp_path, *SMALL, "init_from=hf:owner/gated", "output_dir=run", **{**environment, "HF_TOKEN": "hf_x"}
    )
    assert done.returncode == 0, done.stderr
    hub.close()
    done = run_exp(tmp_path, *SMALL, "init_from=timm:small_vit.sat493m", "output_dir=run2", **environment)
    assert done.returncode == 3
    assert f"cannot fetch it from {hub.url} (" in first_line(done)
    assert "set HF_ENDPOINT to a mirror" in first_line(done)


def test_without_the_library(tmp_path):
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "huggingface_hub.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join([str(shadow), clean_environment().get("PYTHONPATH", "")])
    done = run_exp(tmp_path, *SMALL, "init_from=timm:x", "output_dir=run", fresh=True, PYTHONPATH=path)
    assert done.returncode == 3
    assert "init_from=timm:x needs huggingface_hub, which is not installed; pip install 'exp[hub]'" in first_line(done)


def test_names():
    assert parse("timm:a.b@v1")[1:] == ("timm/a.b", "v1")
    assert parse("hf:o/n")[1:] == ("o/n", "main")
    for text in ("hf:", "hf:o/n@", "timm:a/b", "hf:o/n/x", "hf:o n/x"):
        with pytest.raises(ConfigError):
            parse(text)
    assert ExpConfig().record.weights == {}


@pytest.mark.parametrize("lost", ["model-00002-of-00002.safetensors"])
def test_a_folder_of_parts(tmp_path, hub, lost):
    from exp.engine.fit import read_weights
    from exp.errors import CheckpointError

    for name, content in hub.repositories["owner/parts"].items():
        (tmp_path / name).write_bytes(content)
    assert len(read_weights(tmp_path).state) > 20
    (tmp_path / lost).unlink()
    with pytest.raises(CheckpointError, match=f"lists {lost}, which is not beside it"):
        read_weights(tmp_path)
