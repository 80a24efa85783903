"""``init_from=hf:...``, ``timm:...`` and ``ms:...``, against a hub on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import save

from tests.behaviour.conftest import SCENES, first_line, result
from tests.behaviour.hub import COMMIT, Hub
from tests.behaviour.test_launch import places
from tests.conftest import Forked, clean_environment

pytest.importorskip("huggingface_hub")

SCENE = [*SCENES, "max_steps=1", "sanity_check=false", "schedule.warmup_steps=0"]
CARD = b"---\nlicense: other\nlicense_name: open-earth-1\n---\n# Weights\nlicense: none\n"
SATELLITE = {"image_mean": [0.430, 0.411, 0.296], "image_std": [0.213, 0.156, 0.143], "rescale_factor": 1 / 255}
WHOLE = "model.safetensors"


@pytest.fixture
def hub(trained, tmp_path):
    state = torch.load(str(trained("scenes") / "checkpoints" / "best.pth"))["state_dict"]
    weights = {key[len("backbone.") :]: value for key, value in state.items() if key.startswith("backbone.")}
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    hub = Hub()
    hub.repositories = {
        "timm/small": {WHOLE: save(weights), "README.md": CARD, "config.json": b'{"num_attention_heads": 2}',
                       "preprocessor_config.json": json.dumps(SATELLITE).encode()},
        "owner/parts": {"model.safetensors.index.json": json.dumps(index).encode(),
                        **{file: save({name: weights[name] for name in held}) for file, held in parts.items()}},
        "owner/pickled": {"pytorch_model.bin": b"..."},
        "owner/gated": {WHOLE: save(weights)},
    }  # fmt: skip
    hub.gated.add("owner/gated")
    hub.weights = weights
    yield hub
    hub.close()


def cached(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def test_weights_are_fetched_recorded_and_used_without_a_network(exp, hub):
    environment = {**hub.environment(exp.folder / "cache"), "HF_ENDPOINT": hub.url.replace("//", "//me:secret@")}
    done = exp(*SCENE, "init_from=timm:small", "output_dir=run", **environment)
    assert done.returncode == 0, done.stderr
    files = hub.repositories["timm/small"]
    assert result(exp.path("run"))["weights"] == {
        "source": "timm:small",
        "repository": "timm/small",
        "commit": COMMIT,
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name != "README.md"},
        "license": "open-earth-1",
        "endpoint": hub.url,
    }
    trained = torch.load(str(exp.path("run") / "checkpoints" / "best.pth"))["state_dict"]
    assert torch.allclose(trained["pixel_mean"].flatten() / 255, torch.tensor(SATELLITE["image_mean"]))
    assert (trained["backbone.cls_token"] - hub.weights["cls_token"]).abs().max() < 1e-2, "one step from the weights"
    hub.close()
    asked = len(hub.gets)
    done = exp(*SCENE, "init_from=timm:small", "output_dir=again", **environment)
    assert done.returncode == 0, done.stderr
    assert len(hub.gets) == asked
    assert "secret" not in done.stderr + (exp.path("again") / "config.yaml").read_text()


def test_a_connection_that_breaks_is_made_again(exp, hub):
    hub.cut = 1000
    command = [*SCENE, "init_from=timm:small", "output_dir=run"]
    done = exp(*command, **hub.environment(exp.folder / "cache"))
    if done.returncode == 3:  # of the library's versions before 1, which go on at the next start
        done = exp(*command, **hub.environment(exp.folder / "cache"))
    assert done.returncode == 0, done.stderr
    assert hub.cut is None
    assert [file for file, _ in hub.gets].count(WHOLE) == 2


def test_what_has_no_digest_or_another_is_refused(exp, hub):
    """The library makes a path of what a mirror gives as the digest of a file, and does not compare the two."""
    environment = hub.environment(exp.folder / "deep" / "cache")
    cache = exp.folder / "deep" / "cache" / "hub"
    for etag in ("../../../../outside", f"{exp.folder}/outside", "no-digest", "0" * 64):
        hub.etags[WHOLE] = etag
        done = exp(*SCENE, "init_from=timm:small", "output_dir=run", **environment)
        assert done.returncode == 3, (etag, done.stderr)
        assert WHOLE in first_line(done) or etag in first_line(done)
        assert cached(exp.folder) == cached(cache)
        assert not (cache / "models--timm--small" / "blobs" / etag).exists()


@pytest.mark.extended
def test_a_server_that_stands_still_ends_in_an_error(exp, hub):
    hub.cut, hub.stands_still = 1000, True
    environment = {**hub.environment(exp.folder / "cache"), "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    done = exp(*SCENE, "init_from=timm:small", "output_dir=run", timeout=120, **environment)
    assert done.returncode == 3, done.stderr
    assert "timm:small" in first_line(done)
    assert not exp.path("run").exists()


def test_what_goes_wrong_is_one_line_and_leaves_nothing(exp, hub, tmp_path):
    environment = hub.environment(tmp_path / "cache")
    mirror = {**environment, "HF_ENDPOINT": hub.url.replace("//", "//me:secret@")}
    for name, said in {
        "hf:owner/unknown": "owner/unknown",
        "hf:owner/parts@v9": "v9",
        "hf:owner/gated": "HF_TOKEN",
        "hf:owner/pickled": "pytorch_model.bin",
    }.items():
        how = environment if name == "hf:owner/gated" else mirror  # a password of the URL would open it
        done = exp(*SCENE, f"init_from={name}", "output_dir=run", **how)
        assert done.returncode == 2, (name, done.stderr)
        assert said in first_line(done)
        assert "secret" not in done.stdout + done.stderr
        assert not exp.path("run").exists()
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "huggingface_hub.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join([str(shadow), clean_environment().get("PYTHONPATH", "")])
    broken = exp(*SCENE, "init_from=hf:owner/broken", "output_dir=run", **mirror)
    assert (broken.returncode, "secret" in broken.stdout + broken.stderr) == (3, False), broken.stderr
    assert hub.url in first_line(broken)
    for more, said in (({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"), ({"PYTHONPATH": path}, "huggingface_hub"),
                       ({"HF_ENDPOINT": "http://me:secret@127.0.0.1:9"}, "http://127.0.0.1:9")):  # fmt: skip
        done = exp(*SCENE, "init_from=timm:small", "output_dir=run", **{**environment, **more})
        assert done.returncode == 3, (more, done.stderr)
        assert said in first_line(done)
        assert "secret" not in done.stdout + done.stderr


@pytest.mark.extended
def test_ranks_started_outside_fetch_once(exp, hub, tmp_path):
    environment = hub.environment(tmp_path / "cache")
    command = [*SCENE, "init_from=hf:owner/parts", "output_dir=run", "launcher=external"]
    ranks = [Forked(tmp_path, *command, **environment, **place) for place in places(2)]
    said = [rank.communicate(200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    fetched = [file for file, _ in hub.gets]
    assert sorted(fetched) == sorted(set(fetched)), "in parts, and each once"
    assert len(result(exp.path("run"))["weights"]["files"]) == 3


@pytest.mark.extended
def test_modelscopes_weights_are_fetched_verified_recorded_and_used_without_a_network(exp, hub, tmp_path):
    pytest.importorskip("modelscope_hub")
    environment = {"MODELSCOPE_ENDPOINT": hub.url, "MODELSCOPE_CACHE": str(tmp_path / "cache"),
                   "MODELSCOPE_HOME": str(tmp_path / "home"), "MODELSCOPE_API_TOKEN": ""}  # fmt: skip
    for name, said in {
        "ms:owner/unknown": "owner/unknown",
        "ms:owner/parts@v9": "v9",
        "ms:owner/gated": "MODELSCOPE_API_TOKEN",
        "ms:owner/pickled": "pytorch_model.bin",
    }.items():
        done = exp(*SCENE, f"init_from={name}", "output_dir=run", **environment)
        assert (done.returncode, done.stderr.count("Traceback")) == (2, 0), (name, done.stderr)
        assert said in done.stderr
        assert not exp.path("run").exists()
    for name, more in {"ms:owner/broken": {}, "ms:owner/parts": {"MODELSCOPE_ENDPOINT": "http://127.0.0.1:9"}}.items():
        done = exp(*SCENE, f"init_from={name}", "output_dir=run", **{**environment, **more})
        assert done.returncode == 3, (name, done.stderr)
        assert "http://127.0.0.1" in first_line(done)
    hub.etags[WHOLE] = "0" * 64
    done = exp(*SCENE, "init_from=ms:timm/small", "output_dir=run", **environment)
    assert (done.returncode, f"mismatch for {WHOLE}" in done.stderr) == (3, True), done.stderr
    done = exp(*SCENE, "init_from=ms:owner/parts", "output_dir=run", "nproc=2", **environment)
    assert done.returncode == 0, done.stderr
    about = result(exp.path("run"))["weights"]
    files = hub.repositories["owner/parts"]
    assert about["files"] == {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    assert (len(about["files"]), about["commit"], about["endpoint"]) == (3, "master", hub.url)
    asked = len(hub.gets)
    hub.close()
    assert exp(*SCENE, "init_from=ms:owner/parts", "output_dir=again", **environment).returncode == 0
    assert len(hub.gets) == asked
