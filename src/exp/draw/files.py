"""Pictures as files: PNG, and beside it the format that a paper wants, in the size that it wants."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Union

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from exp.draw.figure import figure_file, new_figure, resize

if TYPE_CHECKING:
    from exp.config.schema import FiguresConfig

__all__ = ["Picture", "encoded", "pixels_png"]

Picture = Union[Figure, np.ndarray, bytes]
"""A matplotlib figure; pixels, RGB (H, W, 3), uint8; or a PNG file, which is taken as it is."""


def encoded(picture: Picture, figures: FiguresConfig) -> dict[str, bytes]:
    """The files that ``figures`` of the configuration asks for.

    A figure is drawn in the size and resolution asked for. Pixels stay as they are: the size is that at which they are
    printed.

    Args:
        picture: complete; a figure is changed.
        figures: format, size and resolution.

    Returns:
        The files by format: ``png``, which reports and trackers show, and ``figures.format`` if that is another.
    """
    formats = dict.fromkeys(("png", figures.format))
    if isinstance(picture, Figure):
        resize(picture, figures.width, figures.height)
        return {form: figure_file(picture, form, figures.dpi) for form in formats}
    if isinstance(picture, bytes):
        with Image.open(io.BytesIO(picture)) as image:
            pixels = np.asarray(image.convert("RGB"))
        return {form: picture if form == "png" else _pixels_file(pixels, form, figures) for form in formats}
    return {form: _pixels_file(picture, form, figures) for form in formats}


def pixels_png(pixels: np.ndarray, dpi: float | None = None) -> bytes:
    """Pixels, RGB (H, W, 3), uint8, as a PNG file.

    Args:
        pixels: of the picture.
        dpi: how many of them are to be printed on an inch; None: not said.
    """
    buffer = io.BytesIO()
    # Level 1: files a tenth larger, written in a third of the time.
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1, **({"dpi": (dpi, dpi)} if dpi else {}))
    return buffer.getvalue()


def _pixels_file(pixels: np.ndarray, form: str, figures: FiguresConfig) -> bytes:
    height, width = pixels.shape[:2]
    dpi = width / figures.width if figures.width else height / figures.height if figures.height else figures.dpi
    if form == "png":
        return pixels_png(pixels, dpi)
    figure = new_figure(width / dpi, height / dpi, dpi)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), frameon=False, xticks=[], yticks=[])
    axes.imshow(pixels, interpolation="none", aspect="auto")  # the file holds each pixel as it is
    return figure_file(figure, form)
