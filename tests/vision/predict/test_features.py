from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from exp.distributed import Distributed
from exp.errors import RunError
from exp.vision.features import Components, image_features, write_image
from exp.vision.models import SceneClassifier
from exp.vision.predict import name_inputs
from tests.vision.parts import vit


@pytest.fixture
def model():
    torch.manual_seed(0)
    return SceneClassifier(3, backbone=vit(embed_dim=32, depth=1, num_heads=2, layer_scale_init=1.0)).eval()


def noise(height, width):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_an_image_that_fits_is_seen_whole_and_a_large_one_by_windows(make_session, model):
    pixels = noise(70, 100)
    cls, patches = image_features(make_session(), model, pixels, 128)
    with torch.no_grad():
        direct = model.features(torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0))
    torch.testing.assert_close((cls, patches), (direct.cls[0][0], direct.maps[0][0].permute(1, 2, 0)))
    seen = []
    model.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(max(inputs[0].shape[-2:])))
    cls, patches = image_features(make_session(), model, np.full((300, 200, 3), 255, np.uint8), 128)
    assert (cls.shape, patches.shape) == ((32,), (19, 13, 32))
    assert len(seen) > 1
    assert max(seen) <= 128
    # A white image looks the same everywhere, but where it is padded to whole patches.
    assert patches[:15, :9].std(dim=(0, 1)).max() < 0.1 * patches.std()


def test_files_hold_the_features_and_say_of_what(make_session, model):
    images = {"a.png": noise(64, 48), "b.png": noise(32, 32)}
    session = make_session(task_name="features", feature_dtype="float32")
    for entry in name_inputs([Path(name) for name in images]):
        row, patches = write_image(session, model, lambda path: images[path.name], entry)
        if entry.name == "a":
            assert row == ["a.png", "features/a.safetensors", 64, 48, 4, 3]
            assert patches.shape == (4, 3, 32)
    with safe_open(session.folder.path / "features" / "a.safetensors", framework="np") as file:
        assert (file.get_tensor("patches").shape, file.get_tensor("cls").shape) == ((4, 3, 32), (32,))
        assert file.get_tensor("patches").dtype == np.float32
        assert json.loads(file.metadata()["file"]) == "a.png"


@pytest.mark.parametrize("scale", [1e6, float("nan")])
def test_features_that_no_file_should_hold_are_refused(make_session, model, scale):
    model.backbone.norm.weight.data *= scale
    with pytest.raises(RunError, match=r"a.png.* are not finite in float16"):
        write_image(
            make_session(task_name="features"), model, lambda path: noise(32, 32), name_inputs([Path("a.png")])[0]
        )


def components_of(*parts):
    components = Components(12)
    for each in parts:
        components.add(each)
    return components.fit(Distributed())


def test_components_are_those_of_the_singular_value_decomposition_and_give_each_feature_one_color():
    generator = torch.Generator().manual_seed(0)
    mix, _ = torch.linalg.qr(torch.randn(12, 12, generator=generator))
    features = torch.randn(500, 12, generator=generator) * torch.tensor([8.0, 4.0, 2.0] + [0.5] * 9) @ mix + 100.0
    components = components_of(*features.split(37))
    _, values, axes = torch.linalg.svd((features - features.mean(dim=0)).double(), full_matrices=False)
    cosines = (torch.from_numpy(components.axes).double() * axes[:3]).sum(dim=1)
    np.testing.assert_allclose(cosines.abs(), 1.0, atol=1e-5)
    np.testing.assert_allclose(components.deviation, values[:3] / len(features) ** 0.5, rtol=1e-4)
    np.testing.assert_allclose(components.explained, (values.square() / values.square().sum())[:3], rtol=1e-4)
    np.testing.assert_allclose(components_of(*reversed(features.split(50))).axes, components.axes, atol=1e-5)
    assert (components.axes[np.arange(3), np.abs(components.axes).argmax(axis=1)] > 0).all()
    along = components.mean + 2 * components.deviation[1] * components.axes[1]
    colors = components.picture(np.stack([components.mean, along]).reshape(1, 2, 12), 1, 2, 1)
    np.testing.assert_allclose(colors, [[[128, 128, 128], [128, 255, 128]]], atol=1)
    patches = np.zeros((3, 4, 12), np.float32) + components.mean
    patches[0, 2] += 5 * components.deviation[0] * components.axes[0]
    picture = components.picture(patches, 41, 50, 16)
    assert picture.shape == (41, 50, 3)
    row, column = np.unravel_index(picture[..., 0].argmax(), picture.shape[:2])
    assert (row // 16, column // 16) == (0, 2)
