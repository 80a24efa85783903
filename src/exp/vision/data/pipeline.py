"""Pipelines of mmcv's transforms, as a configuration lists them."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import numpy as np
from mmcv.transforms import TRANSFORMS, BaseTransform

import exp.vision.data.transforms  # noqa: F401 - registers ours
from exp.config.resolve import make
from exp.engine.registries import registered
from exp.errors import ConfigError

__all__ = ["Pipeline", "is_resized"]


class Pipeline:
    """Transforms, one after the other.

    Args:
        key: of the configuration, for messages.
        transforms: ``{"type": <name in mmcv's registry>, <arguments>}`` each.

    Raises:
        ConfigError: there is no such transform, or it does not take these arguments.
    """

    def __init__(self, key: str, transforms: Sequence[Mapping[str, Any]]) -> None:
        self.key = key
        self.transforms = [_build(f"{key}[{number}]", spec) for number, spec in enumerate(transforms)]

    def __call__(self, image: np.ndarray, path: str, mask: np.ndarray | None = None, **more: Any) -> dict[str, Any]:
        """Apply all.

        Args:
            image: (H, W, C).
            path: of the image; transforms may look at it.
            mask: (H, W), uint8.
            **more: further keys of mmcv's results.

        Returns:
            mmcv's results: ``img``, ``gt_seg_map`` and others.
        """
        size = image.shape[:2]
        results = {"img": image, "img_path": path, "img_shape": size, "ori_shape": size, "seg_fields": [], **more}
        if mask is not None:
            results.update(gt_seg_map=mask, seg_fields=["gt_seg_map"])
        for transform in self.transforms:
            results = transform(results)
            if results["img"].ndim == 2:  # OpenCV drops a last dimension of 1
                results["img"] = results["img"][..., None]
        return results


def is_resized(results: Mapping[str, Any]) -> bool:
    """Whether a pipeline has changed the size of an image by one ``Resize`` alone: nothing is cut off or added."""
    there, before, factors = results["img"].shape[:2], results["ori_shape"], results.get("scale_factor")
    return (
        there != before
        and factors is not None
        and there == tuple(round(extent * factor) for extent, factor in zip(before, factors[::-1]))
    )


def _build(place: str, spec: Mapping[str, Any]) -> Any:
    name = spec.get("type") if isinstance(spec, Mapping) else None
    if not isinstance(name, str):
        raise ConfigError(f"{place} must be a transform with its arguments, such as {{type: RandomFlip, prob: 0.5}}")
    cls = registered(f"{place}.type", name, TRANSFORMS, BaseTransform)
    arguments = {key: _tuples(value) for key, value in spec.items() if key != "type"}
    try:
        return make(cls, name, place, arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{place} ({name}) does not take these arguments: {error}") from error


def _tuples(value: Any) -> Any:
    """Lists of numbers as tuples: mmcv wants sizes and ranges as tuples, and other lists as lists."""
    if not isinstance(value, list):
        return value
    if all(isinstance(item, (int, float)) for item in value):
        return tuple(value)
    return [_tuples(item) for item in value]
