"""Conversions of images and labels to RGB for display."""

from __future__ import annotations

from typing import Sequence, Tuple

import cv2
import numpy as np

__all__ = ["Color", "colorize", "enlarge", "overlay_labels", "palette_table", "resize_labels", "shrink", "to_rgb"]

Color = Tuple[int, int, int]
VALUE_STEPS = 254


def to_rgb(image: np.ndarray) -> np.ndarray:
    """Convert an image of any number of channels to RGB. Shrink large images first.

    Args:
        image: (H, W, C), 0..255. uint8 values are unchanged. float32 values come from sensors that use a small part of
            their range: they are stretched so that 1 % of them are black and 1 % are white.

    Returns:
        (H, W, 3), uint8: the first three channels, or one channel three times.
    """
    image = image[..., :3] if image.shape[-1] >= 3 else image[..., :1].repeat(3, axis=-1)
    if image.dtype != np.uint8:
        low, high = np.percentile(image, (1, 99))
        image = np.clip((image - low) * (255.0 / max(high - low, 1e-6)), 0, 255).round().astype(np.uint8)
    return np.ascontiguousarray(image)


def shrink(image: np.ndarray, longest: int) -> np.ndarray:
    """Scale an image to at most ``longest`` pixels on its longer side, by area means; (h, w, C), the same dtype."""
    factor = longest / max(image.shape[:2])
    if factor >= 1.0:
        return image
    height, width = (max(round(extent * factor), 1) for extent in image.shape[:2])
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA).reshape(height, width, -1)


def resize_labels(labels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize labels by nearest neighbor (the label at each pixel's center); (height, width), the same dtype."""
    both = zip(labels.shape, (height, width))
    rows, columns = ((2 * np.arange(target) + 1) * extent // (2 * target) for extent, target in both)
    return np.asarray(labels[rows][:, columns])


def enlarge(image: np.ndarray, least: int) -> np.ndarray:
    """Repeat whole pixels until the longer side has at least ``least``, so that a tiny image stays sharp."""
    factor = -(-least // max(image.shape[:2]))
    return image if factor <= 1 else image.repeat(factor, axis=0).repeat(factor, axis=1)


def palette_table(palette: Sequence[Color]) -> np.ndarray:
    """The colors of class numbers, uint8 (256, 3); black for numbers of no class."""
    table = np.zeros((256, 3), np.uint8)
    table[: len(palette)] = palette
    return table


def colorize(labels: np.ndarray, palette: Sequence[Color]) -> np.ndarray:
    """Convert labels, uint8 (H, W), to RGB, uint8 (H, W, 3); pixels without a class are black."""
    return palette_table(palette)[labels]


def value_labels(values: np.ndarray, limits: Sequence[float]) -> np.ndarray:
    """Numbers of colors for values (H, W): 0 for the lowest to 254 for the highest of the limits; 255 for NaN."""
    low, high = limits
    steps = np.clip((np.nan_to_num(values, nan=low) - low) * (VALUE_STEPS / (high - low)), 0, VALUE_STEPS).round()
    return np.where(np.isnan(values), 255, steps).astype(np.uint8)


def value_palette() -> list[Color]:
    """The color of each number of :func:`value_labels` but the last: viridis, from dark to bright."""
    numbers = np.linspace(0, 255, VALUE_STEPS + 1).round().astype(np.uint8)
    colors = cv2.cvtColor(cv2.applyColorMap(numbers, cv2.COLORMAP_VIRIDIS), cv2.COLOR_BGR2RGB)
    return [(int(red), int(green), int(blue)) for red, green, blue in colors.reshape(-1, 3)]


def overlay_labels(picture: np.ndarray, labels: np.ndarray, palette: Sequence[Color]) -> np.ndarray:
    """Blend the colors of classes with an image, and darken the borders between classes.

    Args:
        picture: RGB (H, W, 3), uint8.
        labels: (H, W), uint8; pixels without a class are not blended.
        palette: RGB of each class.

    Returns:
        RGB (H, W, 3), uint8.
    """
    # Half of each, in uint8: floats would take a gigabyte for a large picture.
    mixed = picture // 2 + (palette_table(palette) // 2)[labels]
    unknown = labels >= len(palette)
    mixed[unknown] = picture[unknown]
    border = np.zeros(labels.shape, bool)
    border[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    border[1:] |= labels[1:] != labels[:-1]
    mixed[border] //= 2
    return mixed
