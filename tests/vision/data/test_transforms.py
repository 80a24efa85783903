from __future__ import annotations

import colorsys
import random

import numpy as np
import pytest

from exp.data.seeding import preserved_generators, seed_sample
from exp.errors import ConfigError
from exp.vision.data.pipeline import Pipeline
from exp.vision.data.transforms import PadTo, PhotoMetricDistortion, RandomCrop, RandomRotate90


@pytest.fixture(autouse=True)
def generators():
    with preserved_generators():
        seed_sample(0, 0, 0)
        yield


def pair(height=60, width=80, channels=3, dtype=np.uint8):
    """An image whose first channel holds what its mask holds."""
    mask = np.random.randint(0, 200, (height, width)).astype(np.uint8)
    image = np.random.randint(0, 256, (height, width, channels)).astype(dtype)
    image[..., 0] = mask
    return {"img": image, "gt_seg_map": mask}


@pytest.mark.parametrize("transform", [RandomCrop(32), RandomCrop((100, 20)), RandomRotate90(1.0)])
def test_image_and_mask_stay_together(transform):
    for _ in range(10):
        results = transform(pair())
        np.testing.assert_array_equal(results["img"][..., 0], results["gt_seg_map"])
        assert results["img_shape"] == results["img"].shape[:2]
    if isinstance(transform, RandomCrop):
        assert results["img_shape"] == (min(transform.height, 60), min(transform.width, 80))


def test_a_crop_avoids_what_is_all_of_one_class():
    """A class of a tenth in one corner; 255 does not count."""
    mask = np.zeros((100, 100), np.uint8)
    mask[:30, :30] = 1
    mask[70:] = 255
    image = np.zeros((100, 100, 3), np.uint8)

    def mixed(transform, count=200):
        shares = []
        for _ in range(count):
            known = transform({"img": image, "gt_seg_map": mask.copy()})["gt_seg_map"]
            known = known[known != 255]
            shares.append(known.size > 0 and 0.25 < known.mean() < 0.75)
        return np.mean(shares)

    assert mixed(RandomCrop(20, cat_max_ratio=0.75)) > 2 * mixed(RandomCrop(20))


def test_padding_does_not_count():
    sample = pair(20, 90, channels=7)
    padded = PadTo(64)(dict(sample))
    assert padded["img"].shape == (64, 90, 7)
    np.testing.assert_array_equal(padded["img"][:20], sample["img"])
    np.testing.assert_array_equal(padded["gt_seg_map"][:20], sample["gt_seg_map"])
    assert (padded["img"][20:] == 0).all()
    assert (padded["gt_seg_map"][20:] == 255).all()


def test_all_quarter_turns_are_as_likely():
    results = [RandomRotate90(0.75)({"img": np.arange(4).reshape(2, 2, 1)})["img"][0, 0, 0] for _ in range(400)]
    assert np.bincount(results, minlength=4).min() > 60
    assert all(RandomRotate90(0.0)({"img": np.arange(4).reshape(2, 2, 1)})["img"][0, 0, 0] == 0 for _ in range(20))


def only(**changed):
    nothing = {"brightness_delta": 0.0, "contrast_range": (1, 1), "saturation_range": (1, 1), "hue_delta": 0}
    return PhotoMetricDistortion(**{**nothing, **changed})


def changed_once(transform, results):
    """Applies it until it does something, which it does in half of the cases."""
    for _ in range(30):
        made = transform(dict(results))["img"]
        if not np.array_equal(made, results["img"]):
            return made
    raise AssertionError("it never did anything")


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_brightness_and_contrast(dtype):
    image = pair(channels=5, dtype=dtype)["img"]
    brighter = changed_once(only(brightness_delta=20.0), {"img": image})
    assert brighter.dtype == dtype
    inside = (brighter > 0) & (brighter < 255)
    shift = (brighter.astype(float) - image)[inside]
    assert abs(shift).max() <= 20.5
    assert np.ptp(shift) <= 1.0  # all pixels by the same
    harder = changed_once(only(contrast_range=(1.5, 1.5)), {"img": image})
    np.testing.assert_allclose(harder, np.clip(image * 1.5, 0, 255), atol=0.51)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_saturation_and_hue(dtype):
    image = np.random.randint(40, 200, (8, 8, 3)).astype(dtype)
    for options, expected in (
        ({"saturation_range": (0.5, 0.5)}, lambda h, s, v: (h, s / 2, v)),
        ({"hue_delta": 18}, None),
    ):
        made = changed_once(only(**options), {"img": image})
        before, after = (
            np.array([colorsys.rgb_to_hsv(*pixel) for pixel in picture.reshape(-1, 3) / 255.0])
            for picture in (image, made)
        )
        np.testing.assert_allclose(after[:, 2], before[:, 2], atol=0.01)  # value stays
        if expected is not None:
            np.testing.assert_allclose(after[:, 1], before[:, 1] / 2, atol=0.02)
        else:
            turned = np.angle(np.exp(2j * np.pi * (after[:, 0] - before[:, 0]))) / (2 * np.pi) * 360
            colourful = before[:, 1] > 0.3
            assert np.ptp(turned[colourful]) < 12
            assert 1 < abs(np.median(turned)) <= 37


def test_images_without_colours_keep_theirs():
    image = pair(channels=5)["img"]
    transform = only(hue_delta=18, saturation_range=(0.5, 1.5))
    for _ in range(10):
        np.testing.assert_array_equal(transform({"img": image})["img"], image)


@pytest.mark.parametrize("channels", [1, 3, 13])
def test_mmcv_s_transforms_take_any_number_of_channels(channels):
    pipeline = Pipeline(
        "data.train_pipeline",
        [
            {"type": "RandomResize", "scale": [64, 64], "ratio_range": [0.5, 2.0], "keep_ratio": True},
            {"type": "RandomCrop", "crop_size": 48},
            {"type": "RandomFlip", "prob": 0.5, "direction": ["horizontal", "vertical"]},
            {"type": "RandomRotate90"},
            {"type": "PhotoMetricDistortion"},
            {"type": "PadTo", "size": 48},
        ],
    )
    for _ in range(5):
        sample = pair(channels=channels)
        results = pipeline(sample["img"], "x.png", sample["gt_seg_map"])
        assert results["img"].shape == (48, 48, channels)
        assert results["gt_seg_map"].shape == (48, 48)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"type": "RandomFlop"}, r"data.train_pipeline\[1\].type=RandomFlop.*'RandomFlip'"),
        ({"type": "RandomCrop", "crop": 3}, r"data.train_pipeline\[1\]: RandomCrop needs"),
        ({"type": "RandomCrop", "crop_size": 0}, r"\(RandomCrop\) does not take these arguments: .*must be positive"),
        ({"prob": 1}, r"data.train_pipeline\[1\] must be a transform with its arguments"),
    ],
)
def test_a_wrong_transform_is_named(spec, said):
    with pytest.raises(ConfigError, match=said):
        Pipeline("data.train_pipeline", [{"type": "RandomRotate90"}, spec])


def test_generators_are_put_back():
    random.seed(5)
    np.random.seed(5)
    expected = (random.random(), np.random.random(), np.random.random())
    random.seed(5)
    np.random.seed(5)
    first = (random.random(), np.random.random())
    with preserved_generators():
        seed_sample(1, 2, 3)
        np.random.standard_normal(3)
    assert (*first, np.random.random()) == expected
