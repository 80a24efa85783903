from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from exp.data.loader import preserved_generators, seed_sample
from exp.errors import ConfigError, UnavailableError
from exp.vision.data.transforms import PadTo, PhotoMetricDistortion, Pipeline, RandomCrop, RandomRotate90


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


@pytest.mark.parametrize(("transform", "sizes"), [
    (RandomCrop(32), {(32, 32)}),
    (RandomCrop((100, 20)), {(60, 20)}),
    (RandomRotate90(1.0), {(80, 60), (60, 80)}),
])  # fmt: skip
def test_image_and_mask_stay_together(transform, sizes):
    for _ in range(10):
        results = transform(pair())
        np.testing.assert_array_equal(results["img"][..., 0], results["gt_seg_map"])
        assert results["img_shape"] == results["img"].shape[:2]
        assert results["img_shape"] in sizes


def test_a_crop_avoids_what_is_all_of_one_class():
    """A class of a tenth in one corner; 255 does not count."""
    mask = np.zeros((100, 100), np.uint8)
    mask[:30, :30] = 1
    mask[70:] = 255

    def mixed(transform):
        crops = (transform({"img": mask[..., None], "gt_seg_map": mask})["gt_seg_map"] for _ in range(200))
        return sum(0.25 < (crop == 1).sum() / max((crop != 255).sum(), 1) < 0.75 for crop in crops)

    assert mixed(RandomCrop(20, cat_max_ratio=0.75)) > 2 * mixed(RandomCrop(20))


def test_padding_does_not_count():
    sample = pair(20, 90, channels=7)
    padded = PadTo(64)(dict(sample))
    for key, value in (("img", 0), ("gt_seg_map", 255)):
        assert padded[key].shape[:2] == (64, 90)
        np.testing.assert_array_equal(padded[key][:20], sample[key])
        assert (padded[key][20:] == value).all()


def changed(image, **options):
    """What a distortion of one kind makes of it, once it does something, which it does in half of the cases."""
    nothing = {"brightness_delta": 0.0, "contrast_range": (1, 1), "saturation_range": (1, 1), "hue_delta": 0}
    made = (PhotoMetricDistortion(**{**nothing, **options})({"img": image})["img"] for _ in range(30))
    return next((each for each in made if not np.array_equal(each, image)), None)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_brightness_and_contrast(dtype):
    image = pair(channels=5, dtype=dtype)["img"]
    brighter = changed(image, brightness_delta=20.0)
    shift = (brighter.astype(float) - image)[(brighter > 0) & (brighter < 255)]
    assert abs(shift).max() <= 20.5
    assert np.ptp(shift) <= 1.0  # all pixels by the same
    harder = changed(image, contrast_range=(1.5, 1.5))
    np.testing.assert_allclose(harder, np.clip(image * 1.5, 0, 255), atol=0.51)
    assert brighter.dtype == harder.dtype == dtype


def test_saturation_and_hue():
    """Half the saturation of red is pink; 36 of 60 degrees towards yellow or magenta are 120 of 200."""
    red = np.full((4, 4, 3), (200, 0, 0), np.uint8)
    np.testing.assert_allclose(changed(red, saturation_range=(0.5, 0.5))[0, 0], (200, 100, 100), atol=1)
    turned = [changed(red, hue_delta=18)[0, 0] for _ in range(40)]
    low, middle, high = np.sort(turned, axis=1).T
    np.testing.assert_allclose(low, 0, atol=1)
    np.testing.assert_allclose(high, 200, atol=1)
    assert 90 < middle.max() <= 121


@pytest.mark.parametrize(("spec", "said"), [
    ({"type": "RandomFlop"}, "RandomFlop.*'RandomFlip'"),
    ({"type": "RandomCrop", "crop": 3}, r"\.crop: .*RandomCrop.*crop_size'"),
    ({"prob": 1}, "must be a transform"),
])  # fmt: skip
def test_a_wrong_transform_is_named(spec, said):
    with pytest.raises(ConfigError, match=rf"data.train_pipeline\[1\].*{said}"):
        Pipeline("data.train_pipeline", [{"type": "RandomRotate90"}, spec])


# -- albumentations ----------------------------------------------------------------------------------------------------


@pytest.fixture
def albumentations(monkeypatch):
    """The package, where it is installed or in the folder that ``make test-all`` installs it into."""
    monkeypatch.syspath_prepend(str(Path(sys.prefix) / "albumentations"))
    return pytest.importorskip("albumentations")


def albu(*transforms):
    return Pipeline("data.train_pipeline", [{"type": "Albu", "transforms": list(transforms)}])


def of_sample(pipeline, image, mask, number, epoch=0):
    seed_sample(0, epoch, number)
    return pipeline(image, "a.png", mask)


@pytest.mark.extended
def test_albumentations_draws_by_sample_and_keeps_image_and_mask_together(albumentations):
    flips = [{"type": "HorizontalFlip", "p": 0.5}, {"type": "VerticalFlip", "p": 0.5}]
    sample = pair()
    image, mask = sample["img"], sample["gt_seg_map"]
    for pipeline in (albu(*flips), albu({"type": "OneOf", "transforms": flips, "p": 0.8})):
        first = [of_sample(pipeline, image, mask, number) for number in range(40)]
        again = [of_sample(pipeline, image, mask, number) for number in reversed(range(40))][::-1]
        for one, two in zip(first, again):
            np.testing.assert_array_equal(one["img"], two["img"])
            np.testing.assert_array_equal(one["img"][..., 0], one["gt_seg_map"])
        kinds = {(np.array_equal(each["img"][0, 0], image[0, -1]), np.array_equal(each["img"][0, 0], image[-1, 0]),
                  np.array_equal(each["img"], image)) for each in first}  # fmt: skip
        assert {(True, False, False), (False, True, False), (False, False, True)} <= kinds, "drawn independently"
    assert any(not np.array_equal(of_sample(pipeline, image, mask, n, 1)["img"], first[n]["img"]) for n in range(9))


@pytest.mark.extended
def test_what_albumentations_adds_to_a_mask_is_ignored_and_values_keep_their_range(albumentations):
    sample = pair()
    for spec in ({"type": "Rotate", "limit": [45, 45], "p": 1.0}, {"type": "Affine", "scale": 0.5, "p": 1.0},
                 {"type": "PadIfNeeded", "min_height": 100, "min_width": 100}):  # fmt: skip
        done = albu(spec)(sample["img"], "a.png", sample["gt_seg_map"])
        assert set(done["gt_seg_map"][(done["img"] == 0).all(axis=2)].tolist()) == {255}, spec
        assert done["img_shape"] == done["img"].shape[:2] == done["gt_seg_map"].shape
    padded = albu({"type": "PadIfNeeded", "min_height": 100, "min_width": 100, "fill_mask": 7})
    assert 255 not in padded(sample["img"], "a.png", sample["gt_seg_map"])["gt_seg_map"]
    brighter = albu(
        {"type": "RandomBrightnessContrast", "brightness_limit": [0.2, 0.2], "contrast_limit": [0, 0], "p": 1}
    )
    dark = np.full((8, 8, 1), 100, np.float32)
    np.testing.assert_allclose(brighter(dark, "a.tif")["img"], np.full((8, 8, 1), 151), atol=0.1)


@pytest.mark.extended
@pytest.mark.parametrize(("spec", "said"), [
    ({"type": "HorizontalFlop"}, "HorizontalFlop is no transform of albumentations.*'HorizontalFlip'"),
    ({"type": "from_dict"}, "from_dict is no transform"),
    ({"type": "Rotate", "limits": 3}, r"Rotate.limits: .*'Albu: Rotate.limit'"),
    ({"type": "Rotate", "p": 3}, "does not take these arguments"),
])  # fmt: skip
def test_a_wrong_transform_of_albumentations_is_named(albumentations, spec, said):
    with pytest.raises(ConfigError, match=said):
        albu(spec)


@pytest.mark.extended
def test_normalized_images_of_albumentations_are_refused(albumentations):
    with pytest.raises(ConfigError, match="Normalize"):
        albu({"type": "Normalize"})(pair()["img"], "a.png")


@pytest.mark.legacy
def test_albumentations_is_refused_by_name_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "albumentations", None)
    with pytest.raises(UnavailableError, match=r"albumentations.*pip install"):
        albu({"type": "HorizontalFlip"})
