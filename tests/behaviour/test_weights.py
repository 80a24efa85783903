"""Weights of DINOv3 backbones: what stands beside them counts, and what is another backbone is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.behaviour.conftest import BACKBONE, first_line

IMAGES = Path(__file__).parents[2] / "data" / "eurosat_rgb"
FEATURES = ["task=features", f"task.input={IMAGES}/River/*1.jpg", "task.max_images=0", "task.feature_dtype=float32"]
ANEW = ["experiment=dinov3_eurosat", "backend=cpu", "data.size=32", *BACKBONE]


def features(run):
    return {file.name: load_file(str(file)) for file in sorted((run / "features").glob("*.safetensors"))}


def test_an_export_keeps_normalization_and_heads(exp, trained):
    run = [f"init_from={trained('scenes')}", "backend=cpu", "model.normalization=satellite"]
    for task, out in ((["task=export", "task.formats=[huggingface]"], "out"), (FEATURES, "direct")):
        done = exp(*run, *task, f"output_dir={out}")
        assert done.returncode == 0, done.stderr
    exported = [*ANEW, *FEATURES, "init_from=out/export/huggingface"]
    done = exp(*exported, "output_dir=again")
    assert done.returncode == 0, done.stderr
    direct, again = features(exp.path("direct")), features(exp.path("again"))
    assert direct.keys() == again.keys()
    assert direct
    for name in direct:
        torch.testing.assert_close(again[name]["patches"], direct[name]["patches"], rtol=1e-5, atol=1e-5)
    done = exp(*exported, "model.backbone.num_heads=4", "output_dir=refused")
    assert done.returncode == 2
    assert "model.backbone.num_heads=2" in first_line(done)


def test_a_folder_of_pickled_weights_is_read_with_its_normalization_and_recorded(exp, trained):
    """Satellite statistics, which only the file beside the weights has; the digest is that of ``sha256sum``."""
    state = torch.load(str(trained("scenes") / "checkpoints" / "best.pth"))["state_dict"]
    folder = exp.folder / "theirs"
    folder.mkdir()
    torch.save({key[len("backbone.") :]: value for key, value in state.items() if key.startswith("backbone.")},
               folder / "pytorch_model.bin")  # fmt: skip
    satellite = {"image_mean": [0.430, 0.411, 0.296], "image_std": [0.213, 0.156, 0.143]}
    (folder / "preprocessor_config.json").write_text(json.dumps(satellite))
    done = exp(*ANEW, "init_from=theirs", "max_epochs=null", "max_steps=1", "plots=false", "output_dir=run")
    assert done.returncode == 0, done.stderr
    found = exp.result("run")
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    assert found["weights"] == {"source": str(folder), "files": digests}
    assert found["data"]["normalization"] == {
        "images": "satellite", "mean": [109.65, 104.805, 75.48], "std": [54.315, 39.78, 36.465]
    }  # fmt: skip
    torch.save({"stages.0.0.dwconv.weight": torch.ones(1)}, exp.folder / "convnext.pth")
    done = exp(*ANEW, "init_from=convnext.pth", "max_epochs=null", "max_steps=1", "output_dir=refused")
    assert done.returncode == 2
    assert "ConvNeXt" in first_line(done)


def test_other_backbones_and_other_heads_are_named(exp, trained):
    state = torch.load(str(trained("scenes") / "checkpoints" / "best.pth"))["state_dict"]
    backbone = {key[len("backbone.") :]: value for key, value in state.items() if key.startswith("backbone.")}
    backbone["reg_token"] = backbone.pop("storage_tokens")  # as timm calls it
    del backbone["rope.periods"]
    save_file({**backbone, "pos_embed": torch.zeros(1, 5, 16)}, str(exp.folder / "dinov2.safetensors"))
    save_file({**backbone, "head.weight": torch.zeros(7, 16)}, str(exp.folder / "classifier.safetensors"))
    done = exp(*ANEW, "init_from=dinov2.safetensors", "max_steps=1", "output_dir=run")
    assert done.returncode == 2
    assert "DINOv2" in first_line(done)
    done = exp(*ANEW, "task=eval", "init_from=classifier.safetensors", "output_dir=run")
    assert done.returncode == 2
    assert "head.weight" in first_line(done)
    done = exp(*ANEW, *FEATURES, "init_from=classifier.safetensors", "output_dir=run")
    assert done.returncode == 0, done.stderr
