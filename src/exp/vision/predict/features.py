"""Features of images as a backbone gives them, one file for each image, and maps of their principal components."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save

from exp.csvfile import csv_content
from exp.runfolder import to_json, write_atomically
from exp.vision.draw.components import Components, Moments
from exp.vision.draw.pictures import enlarged, shrunk, to_rgb
from exp.vision.narrowing import narrowed
from exp.vision.predict.raster import check_pixels

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed
    from exp.session import Session
    from exp.vision.predict.inputs import Input

__all__ = ["FeatureFile", "FeatureWriter", "feature_picture", "image_features", "index_csv"]

_WINDOW = 1024
_LONGEST = 1024  # pixels of an image beside its map


class FeatureFile(NamedTuple):
    """Where the features of an image are.

    Attributes:
        file: the image.
        features: the file of its features, below the run folder.
        height: pixels of the image as the model saw it.
        width: likewise.
        rows: of patches.
        columns: of patches.
    """

    file: str
    features: str
    height: int
    width: int
    rows: int
    columns: int


class FeatureWriter:
    """Computes and writes the features of one image after the other.

    Attributes:
        moments: of all patch features so far; None before the first.
        written: by the number of the image.

    Args:
        session: the session.
        model: has ``features`` (:class:`exp.vision.dinov3.base.ImageModel`).
        read: an image file as (H, W, C), 0..255.
    """

    def __init__(self, session: Session, model: Any, read: Any) -> None:
        self.session = session
        self.model = model
        self.read = read
        self.moments: Moments | None = None
        self.written: dict[int, FeatureFile] = {}
        task = session.config.task
        self.dtype: str = task.feature_dtype
        self.window: int = task.window or _WINDOW

    def add(self, number: int, entry: Input) -> None:
        """Write ``features/<name>.safetensors``: ``cls`` (D,), ``patches`` (h, w, D); what they are of is its metadata.

        Raises:
            DataError: the image cannot be read.
            RunError: features are not finite, or too large for ``task.feature_dtype``.
        """
        check_pixels(entry.path)
        pixels = resized(self.read(entry.path), self.session.config.task.resize)
        cls, patches = image_features(self.session, self.model, pixels, self.window)
        found = {"cls": cls.numpy(), "patches": patches.numpy()}
        tensors = {key: narrowed(f"{key} of {entry.path}", value, self.dtype) for key, value in found.items()}
        if self.moments is None:
            self.moments = Moments(patches.shape[-1])
        self.moments.add(patches)
        height, width = pixels.shape[:2]
        about = {"file": str(entry.path), "height": height, "width": width, "patch_size": patch_size(self.model)}
        path = self.session.folder.path / "features" / f"{entry.name}.safetensors"
        write_atomically(path, save(tensors, {key: to_json(value) for key, value in about.items()}))
        name = path.relative_to(self.session.folder.path).as_posix()
        self.written[number] = FeatureFile(str(entry.path), name, height, width, *patches.shape[:2])

    def summed(self, distributed: Distributed) -> Components:
        """The principal components over all ranks; every rank must call, also one that had no image."""
        dims = distributed.gather(None if self.moments is None else self.moments.dim)
        dim = next(dim for dim in dims if dim is not None)
        return (self.moments or Moments(dim)).components(distributed)


def patch_size(model: Any) -> int:
    """Pixels along a patch of the model's backbone."""
    return int(model.backbone.patch_size)


def resized(pixels: np.ndarray, longer: int | None) -> np.ndarray:
    """The image with its longer side brought to ``longer`` pixels; None: as it is. The same dtype."""
    if longer is None or longer == max(pixels.shape[:2]):
        return pixels
    if longer < max(pixels.shape[:2]):
        return shrunk(pixels, longer)
    factor = longer / max(pixels.shape[:2])
    size = (round(pixels.shape[1] * factor), round(pixels.shape[0] * factor))
    return cv2.resize(pixels, size, interpolation=cv2.INTER_LINEAR).reshape(size[1], size[0], -1)


def image_features(session: Session, model: Any, pixels: np.ndarray, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of the last block.

    Args:
        session: the session.
        model: has ``features``.
        pixels: (H, W, C), 0..255.
        window: larger images are seen through windows of at most this side; of each, the outer patches are left to its
            neighbours: they have seen less around them.

    Returns:
        ``cls`` (D,): of several windows, their mean by area. ``patches`` (ceil(H / patch), ceil(W / patch), D). Both
        float32, on the CPU.
    """
    height, width = pixels.shape[:2]
    patch = patch_size(model)
    rows, columns = -(-height // patch), -(-width // patch)
    patches: torch.Tensor | None = None
    cls = torch.zeros(())
    for tall in _cells(rows, max(window // patch, 1)):
        for wide in _cells(columns, max(window // patch, 1)):
            part = pixels[tall.first * patch : tall.last * patch, wide.first * patch : wide.last * patch]
            image = torch.from_numpy(np.ascontiguousarray(part.transpose(2, 0, 1))).unsqueeze(0)
            with torch.no_grad(), session.backend.autocast(session.config.precision):
                found = model.features(image.to(session.device))[0]
            share = (tall.end - tall.begin) * (wide.end - wide.begin) / (rows * columns)
            cls = cls + share * found.cls[0].float().cpu()
            inner = found.patches[0].float().cpu()
            session.backend.end_batch()
            if patches is None:
                patches = torch.empty((rows, columns, inner.shape[-1]))
            patches[tall.begin : tall.end, wide.begin : wide.end] = inner[tall.kept, wide.kept]
    assert patches is not None
    return cls, patches


class _Cell(NamedTuple):
    """Patches ``begin`` to ``end`` along one axis, and the window ``first`` to ``last`` that sees them."""

    begin: int
    end: int
    first: int
    last: int

    @property
    def kept(self) -> slice:
        """What of the window is the cell."""
        return slice(self.begin - self.first, self.end - self.first)


def _cells(count: int, window: int) -> list[_Cell]:
    """Cut ``count`` patches into cells of like length, each seen with an eighth of a window around it."""
    if count <= window:
        return [_Cell(0, count, 0, count)]
    margin = window // 8
    number = -(-count // (window - 2 * margin))
    borders = [count * step // number for step in range(number + 1)]
    return [
        _Cell(begin, end, max(begin - margin, 0), min(end + margin, count))
        for begin, end in zip(borders[:-1], borders[1:])
    ]


def index_csv(files: list[FeatureFile]) -> bytes:
    """``file,features,height,width,rows,columns``."""
    return csv_content([FeatureFile._fields, *files])


def feature_picture(folder: Path, entry: FeatureFile, pixels: np.ndarray, components: Components) -> list[np.ndarray]:
    """An image and the map of its features, of one size.

    Args:
        folder: the run folder.
        entry: the written features.
        pixels: (H, W, C), as the model saw it.
        components: of all images.

    Returns:
        Two RGB pictures, uint8.
    """
    with safe_open(folder / entry.features, framework="np") as file:
        patches = file.get_tensor("patches")
        patch = json.loads(file.metadata()["patch_size"])
    picture = enlarged(shrunk(to_rgb(pixels), _LONGEST), 256)
    scale = picture.shape[1] / entry.width
    return [picture, components.picture(patches, picture.shape[0], picture.shape[1], patch * scale)]
