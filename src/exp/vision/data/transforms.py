"""Pipelines of mmcv's transforms, as listed in the configuration, and transforms that mmcv lacks.

Ours are registered and configured by dicts like mmcv's. They read and write ``results["img"]`` (H, W, C) and, if there
is a mask, ``results["gt_seg_map"]`` (H, W). All draw from NumPy's global generator, which the data set seeds for each
sample.
"""

from __future__ import annotations

import copy
import importlib
import os
import random
from typing import Any, Mapping, Sequence

import cv2
import numpy as np
from mmcv.transforms import TRANSFORMS, BaseTransform, Resize

from exp.config.resolve import check_arguments, instantiate
from exp.engine.mmengine import lookup_class
from exp.errors import ConfigError, UnavailableError, nearest
from exp.vision.data.masks import IGNORED, NO_DATA, markers

_ROTATIONS = {1: cv2.ROTATE_90_COUNTERCLOCKWISE, 2: cv2.ROTATE_180, 3: cv2.ROTATE_90_CLOCKWISE}

__all__ = ["Albu", "PadTo", "PhotoMetricDistortion", "Pipeline", "RandomCrop", "RandomRotate90", "is_resized"]


class Pipeline:
    """A sequence of transforms.

    Args:
        key: of the configuration, for messages.
        transforms: ``{"type": <name in mmcv's registry>, <arguments>}`` each.

    Raises:
        ConfigError: there is no such transform, or it does not take these arguments.
    """

    def __init__(self, key: str, transforms: Sequence[Mapping[str, Any]]) -> None:
        self.key = key
        self.transforms = [_build(f"{key}[{number}]", spec) for number, spec in enumerate(transforms)]

    def __call__(
        self, image: np.ndarray, path: str, mask: np.ndarray | None = None, scale: tuple[int, int] | None = None
    ) -> dict[str, Any]:
        """Apply all transforms.

        Args:
            image: (H, W, C).
            path: of the image, for transforms that use it.
            mask: (H, W), uint8.
            scale: (width, height) that each ``Resize`` gives instead of its own; None: its own.

        Returns:
            mmcv's results: ``img``, ``gt_seg_map`` and others.
        """
        size = image.shape[:2]
        results = {"img": image, "img_path": path, "img_shape": size, "ori_shape": size, "seg_fields": []}
        if mask is not None:
            results.update(gt_seg_map=mask, seg_fields=["gt_seg_map"])
        for transform in self.transforms:
            if scale is not None and isinstance(transform, Resize):
                transform = copy.copy(transform)
                transform.scale, transform.keep_ratio = scale, False
            results = transform(results)
            if results["img"].ndim == 2:  # OpenCV drops a last dimension of 1
                results["img"] = results["img"][..., None]
        return results


def is_resized(results: Mapping[str, Any]) -> bool:
    """Whether one ``Resize`` has given an image its size: it is neither cropped nor padded nor flipped."""
    size, original, factors = results["img"].shape[:2], results["ori_shape"], results.get("scale_factor")
    return (
        factors is not None
        and not results.get("flip")
        and size == tuple(round(extent * factor) for extent, factor in zip(original, factors[::-1]))
    )


def _build(key: str, spec: Mapping[str, Any]) -> Any:
    kind = spec.get("type") if isinstance(spec, Mapping) else None
    if not isinstance(kind, str):
        raise ConfigError(f"{key} must be a transform with its arguments, such as {{type: RandomFlip, prob: 0.5}}")
    cls = lookup_class(f"{key}.type", kind, TRANSFORMS, BaseTransform)
    arguments = {name: _tuples(value) for name, value in spec.items() if name != "type"}
    try:
        return instantiate(cls, key, arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{key} ({kind}) does not take these arguments: {error}") from error


def _tuples(value: Any) -> Any:
    """Convert lists of numbers to tuples: mmcv needs tuples for sizes and ranges, and lists otherwise."""
    if not isinstance(value, list):
        return value
    if all(isinstance(item, (int, float)) for item in value):
        return tuple(value)
    return [_tuples(item) for item in value]


@TRANSFORMS.register_module(force=True)
class RandomCrop(BaseTransform):
    """Crop at random; with a mask, up to ten more tries avoid a crop of nearly one class only.

    An image that is smaller than the crop stays as it is in that direction; a ``PadTo`` may follow.

    Args:
        crop_size: side in pixels, or (height, width).
        cat_max_ratio: largest share of the known pixels that one class may have.
    """

    def __init__(self, crop_size: int | Sequence[int], cat_max_ratio: float = 1.0) -> None:
        self.height, self.width = (crop_size, crop_size) if isinstance(crop_size, int) else crop_size
        self.cat_max_ratio = cat_max_ratio

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Crop."""
        image, mask = results["img"], results.get("gt_seg_map")
        window = self._part(image)
        for _ in range(10 if self.cat_max_ratio < 1.0 else 0):
            if mask is None or self._is_mixed(mask[window]):
                break
            window = self._part(image)
        results["img"] = image[window]
        results["img_shape"] = results["img"].shape[:2]
        if mask is not None:
            results["gt_seg_map"] = mask[window]
        return results

    def _part(self, image: np.ndarray) -> tuple[slice, slice]:
        top = np.random.randint(max(image.shape[0] - self.height, 0) + 1)
        left = np.random.randint(max(image.shape[1] - self.width, 0) + 1)
        return slice(top, top + self.height), slice(left, left + self.width)

    def _is_mixed(self, labels: np.ndarray) -> bool:
        counts = np.bincount(labels.reshape(-1), minlength=IGNORED + 1)[:NO_DATA]
        return bool(np.count_nonzero(counts) > 1 and counts.max() < self.cat_max_ratio * counts.sum())


@TRANSFORMS.register_module(force=True)
class PadTo(BaseTransform):
    """Pad at the right and at the bottom: an image of any number of channels with zeros, a mask as ignored.

    Args:
        size: side in pixels, or (height, width); larger images stay as they are.
    """

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = (size, size) if isinstance(size, int) else tuple(size)

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Pad."""
        for key in ("img", "gt_seg_map"):
            pixels: Any = results.get(key)
            value = 0 if key == "img" or pixels is None else markers(pixels.dtype)[0]
            shape = self.size if pixels is None else pixels.shape
            padding = [(0, max(side - extent, 0)) for side, extent in zip(self.size, shape)]
            if any(after for _, after in padding):
                results[key] = np.pad(pixels, [*padding, (0, 0)][: pixels.ndim], constant_values=value)
        results["img_shape"] = results["img"].shape[:2]
        return results


@TRANSFORMS.register_module(force=True)
class RandomRotate90(BaseTransform):
    """Rotate by 90, 180 or 270 degrees with equal probability: images from above have no preferred direction.

    Args:
        prob: probability of a rotation.
    """

    def __init__(self, prob: float = 0.75) -> None:
        self.prob = prob

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Rotate."""
        if np.random.random() >= self.prob:
            return results
        turns = np.random.randint(1, 4)
        for key in ("img", "gt_seg_map"):
            if results.get(key) is not None:
                results[key] = _rotated(results[key], turns)
        results["img_shape"] = results["img"].shape[:2]
        return results


def _rotated(pixels: np.ndarray, turns: int) -> np.ndarray:
    """``pixels`` (H, W) or (H, W, C), turned counterclockwise by 90 degrees 1 to 3 times, and contiguous."""
    if pixels.ndim == 3 and pixels.shape[2] > 4:  # OpenCV takes four channels at most
        return np.ascontiguousarray(np.rot90(pixels, turns))
    return cv2.rotate(pixels, _ROTATIONS[turns])  # ten times as fast


@TRANSFORMS.register_module(force=True)
class PhotoMetricDistortion(BaseTransform):
    """Change brightness, contrast, saturation and hue at random, each with probability 1/2 (Liu et al., SSD, 2016).

    Contrast is changed before or after saturation and hue, with equal probability. Only brightness and contrast change
    in images other than three channels of 8 bits.

    Args:
        brightness_delta: largest shift of values, which are in 0..255.
        contrast_range: smallest and largest factor of values.
        saturation_range: smallest and largest factor of the saturation.
        hue_delta: largest shift of the hue, in units of 2 degrees, as in OpenCV.
    """

    def __init__(
        self,
        brightness_delta: float = 32.0,
        contrast_range: tuple[float, float] = (0.5, 1.5),
        saturation_range: tuple[float, float] = (0.5, 1.5),
        hue_delta: int = 18,
    ) -> None:
        self.brightness_delta = brightness_delta
        self.contrast_range = contrast_range
        self.saturation_range = saturation_range
        self.hue_delta = hue_delta

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Distort."""
        shift = np.random.uniform(-self.brightness_delta, self.brightness_delta) if _half() else 0.0
        contrast_first = _half()
        factor = np.random.uniform(*self.contrast_range) if _half() else 1.0
        saturation = np.random.uniform(*self.saturation_range) if _half() else 1.0
        hue = int(np.random.randint(-self.hue_delta, self.hue_delta + 1)) if _half() else 0
        image = results["img"]
        has_colors = image.shape[2] == 3 and image.dtype == np.uint8
        image = _scaled(image, factor if contrast_first else 1.0, shift)
        if has_colors and (saturation != 1.0 or hue != 0):
            image = _recolored(image, saturation, hue)
        results["img"] = _scaled(image, 1.0 if contrast_first else factor, 0.0)
        return results


def _half() -> bool:
    return bool(np.random.randint(2))


def _scaled(image: np.ndarray, factor: float, shift: float) -> np.ndarray:
    """``(image + shift) * factor``, clipped to 0..255."""
    if factor == 1.0 and shift == 0.0:
        return image
    if image.dtype != np.uint8:
        return np.clip((image + np.float32(shift)) * np.float32(factor), 0.0, 255.0)
    # A table of 256 values: one lookup per value instead of three passes in floating point.
    table = np.clip((np.arange(256.0) + shift) * factor, 0.0, 255.0).round().astype(np.uint8)
    return cv2.LUT(image, table).reshape(image.shape)  # OpenCV drops a last dimension of 1


def _recolored(image: np.ndarray, saturation: float, hue: int) -> np.ndarray:
    colors = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    numbers = np.arange(256)
    table = np.stack([(numbers + hue) % 180, np.clip(numbers * saturation, 0, 255), numbers], axis=-1)
    colors = cv2.LUT(colors, table.round().astype(np.uint8)[None])
    return cv2.cvtColor(colors, cv2.COLOR_HSV2RGB)


@TRANSFORMS.register_module(force=True)
class Albu(BaseTransform):
    """Transforms of albumentations 2, as OpenMMLab's configurations have them: ``{type: Albu, transforms: [...]}``.

    They draw from generators that each sample seeds, like all transforms here; albumentations' own seed would give the
    same numbers to each transform of a list. Pixels that a transform adds to a mask are ignored, unless its
    ``fill_mask`` says otherwise; albumentations' default is class 0.

    Args:
        transforms: ``{"type": <class of albumentations>, <arguments>}`` each; groups such as ``OneOf`` have
            ``transforms`` of their own.

    Raises:
        UnavailableError: albumentations is not installed, or older than 2.
        ConfigError: there is no such transform, or it does not take these arguments.
    """

    def __init__(self, transforms: Sequence[Mapping[str, Any]]) -> None:
        os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else importing it asks the network for its version
        try:
            library: Any = importlib.import_module("albumentations")
        except ImportError as error:
            raise UnavailableError(
                f"the transform Albu needs albumentations, which cannot be imported ({error}): pip install "
                "'exp-accelerators[albumentations]', with Python 3.9 or newer"
            ) from error
        if "set_random_state" not in dir(library.Compose):
            raise UnavailableError(f"the transform Albu needs albumentations 2, not {library.__version__}")
        self.compose = library.Compose([_build_albumentation(library, spec) for spec in transforms])

    def transform(self, results: dict[str, Any]) -> dict[str, Any]:
        """Augment image and mask.

        Raises:
            ConfigError: the result is no image of the same type, as after ``Normalize`` or ``ToTensorV2``.
        """
        # One pair of generators for all transforms, so that their draws are independent.
        seed = int(np.random.randint(2**31))
        self.compose.set_random_state(np.random.default_rng(seed), random.Random(seed))  # noqa: S311
        image, mask = results["img"], results.get("gt_seg_map")
        scale = np.float32(1.0 if image.dtype == np.uint8 else 255.0)  # floating point is 0..1 there
        augmented = self.compose(
            image=image if scale == 1.0 else image / scale, **({} if mask is None else {"mask": mask})
        )
        pixels = augmented["image"]
        if getattr(pixels, "dtype", None) != image.dtype:
            raise ConfigError(
                f"the transform Albu gives {getattr(pixels, 'dtype', type(pixels))} of {image.dtype}: leave out "
                "Normalize and ToTensorV2; the model normalizes on the device"
            )
        results["img"] = pixels if scale == 1.0 else pixels * scale
        results["img_shape"] = pixels.shape[:2]
        if mask is not None:
            results["gt_seg_map"] = augmented["mask"]
        return results


def _build_albumentation(library: Any, spec: Mapping[str, Any]) -> Any:
    kind = spec.get("type") if isinstance(spec, Mapping) else None
    cls = getattr(library, str(kind), None)
    if not (isinstance(cls, type) and issubclass(cls, (library.BasicTransform, library.BaseCompose))):
        raise ConfigError(f"Albu: {kind} is no transform of albumentations{nearest(str(kind), dir(library))}")
    arguments = {name: _tuples(value) for name, value in spec.items() if name != "type"}
    check_arguments(f"Albu: {kind}", cls, arguments)  # of a wrong name albumentations only warns
    if "transforms" in arguments:
        arguments["transforms"] = [_build_albumentation(library, each) for each in spec["transforms"]]
    try:
        made = cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Albu: {kind} does not take these arguments: {error}") from error
    if "fill_mask" not in arguments and vars(made).get("fill_mask") == 0:
        made.fill_mask = IGNORED
    return made
