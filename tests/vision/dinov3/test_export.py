"""task=export: what others read computes what the model does."""

from __future__ import annotations

import json

import pytest
import torch

from exp.compat import supports_export
from exp.vision.dinov3 import SceneClassifier, Segmenter
from exp.vision.dinov3.lora import is_of_lora
from tests.conftest import run_exp
from tests.vision.dinov3.test_lora import LORA, SCENES
from tests.vision.dinov3.test_pyramid_heads import TILES

FORMATS = ["huggingface", "torchscript", *(["torch_export"] if supports_export() else [])]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A classifier with low-rank updates and a segmenter with a head over four blocks, trained a little."""
    folder = tmp_path_factory.mktemp("export")
    scenes = [*SCENES, *LORA, "model.size=vits16plus"]
    for name, settings in (("scenes", scenes), ("tiles", [*TILES, "backend=cpu", "model.head=dpt"])):
        done = run_exp(folder, *settings, f"output_dir={name}")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        exported = run_exp(
            folder, "task=export", f"init_from={name}", f"output_dir={name}-out", f"task.formats=[{','.join(FORMATS)}]",
            "backend=cpu",
        )  # fmt: skip
        assert exported.returncode == 0, f"{exported.stdout}\n{exported.stderr}"
    return folder


def model_of(folder, name):
    """The trained model, made by hand."""
    state = torch.load(folder / name / "checkpoints" / "best.pth")["state_dict"]
    small = {"embed_dim": 16, "num_heads": 2}
    if name == "scenes":
        lora = {"rank": 2, "dropout": 0.1}
        model = SceneClassifier(10, size="vits16plus", depth=2, patch_size=16, layer_scale=0.1, lora=lora, **small)
    else:
        model = Segmenter(5, size="tiny", depth=4, head="dpt", head_channels=16, head_norm="group", **small)
    model.load_state_dict(state)
    return model.eval()


def images(count, channels=3, side=64):
    return torch.randint(0, 256, (count, channels, side, side), generator=torch.Generator().manual_seed(3)).byte()


@pytest.mark.parametrize("name", ["scenes", "tiles"])
def test_programs_give_the_scores_of_any_batch(runs, name):
    model, folder = model_of(runs, name), runs / f"{name}-out" / "export"
    programs = [torch.jit.load(str(folder / "model.torchscript.pt"))]
    if supports_export():
        programs.append(torch.export.load(str(folder / "model.pt2")).module())
    about = json.loads((folder / "export.json").read_text())
    assert about["input"]["shape"] == ["B", 3, 64, 64]
    assert about["input"]["dtype"] == "float32"
    assert about["input"]["dtypes"]["torchscript"] == "uint8 or float32"
    assert about["input"]["no_data"] == pytest.approx(model.pixel_mean.flatten().tolist())
    assert set(about["differences"]) == {"merging", *FORMATS}
    with torch.no_grad():
        for count in (1, 5):
            fractions = images(count) * 0.997  # as files of 16 bits give them
            expected = model(image=fractions, mode="tensor")
            assert list(expected.shape[1:]) == about["output"]["shape"][1:]
            for program in programs:
                torch.testing.assert_close(program(fractions), expected, rtol=1e-4, atol=1e-5)
            whole = model(image=images(count), mode="tensor")
            torch.testing.assert_close(programs[0](images(count)), whole, rtol=1e-4, atol=1e-5)
    for shape in ((2, 3, 60, 64), (2, 3, 64, 128), (2, 4, 64, 64)):
        with pytest.raises(Exception, match=r"images must|Guard failed|size|shape"):
            programs[0](torch.zeros(shape))


@pytest.mark.parametrize("name", ["scenes", "tiles"])
def test_transformers_reads_the_backbone(runs, transformers, name):
    folder = runs / f"{name}-out" / "export" / "huggingface"
    theirs, told = transformers.DINOv3ViTModel.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    mean, std = (torch.tensor(processor[key]).view(1, 3, 1, 1) for key in ("image_mean", "image_std"))
    pixels = (images(2) * processor["rescale_factor"] - mean) / std
    model = model_of(runs, name)
    with torch.no_grad():
        expected = theirs.eval()(pixels).last_hidden_state
        (features,) = model.features(images(2))
    torch.testing.assert_close(features.cls, expected[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(features.patches.flatten(1, 2), expected[:, 5:], rtol=1e-4, atol=1e-4)


def test_later_runs_begin_with_what_was_exported(runs):
    done = run_exp(runs, *SCENES, "model.size=vits16plus", "max_steps=1", "init_from=scenes-out/export/huggingface",
                   "output_dir=later", "optim.lr=0")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "missing in the file: head.weight, head.bias" in done.stdout
    state = torch.load(runs / "later" / "checkpoints" / "best.pth")["state_dict"]
    source = model_of(runs, "scenes")
    source.backbone.merge_updates()
    assert not any(map(is_of_lora, state))
    for key, value in source.backbone.state_dict().items():
        torch.testing.assert_close(state[f"backbone.{key}"], value, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["init_from=scenes", "task.formats=[onnx]"], "task.formats=['onnx'] must name some of huggingface"),
        (["init_from=scenes", "nproc=2"], "task=export runs in one process; set nproc=1"),
    ],
)
def test_what_cannot_be_is_refused(runs, settings, message):
    done = run_exp(runs, "task=export", "backend=cpu", "output_dir=refused", *settings)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert not (runs / "refused").exists()
