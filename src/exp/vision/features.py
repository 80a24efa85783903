"""task=features: features of images as a backbone gives them, as files, and maps of their principal components."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np
import torch
from safetensors.numpy import load_file, save

from exp.engine.building import build_data, build_model, make_result, record_environment
from exp.engine.outputs import PictureWriter
from exp.engine.wrapper import check_placement
from exp.errors import ConfigError, RunError
from exp.runs.files import csv_content, to_json, write_atomically
from exp.vision.draw.components import Components, Moments
from exp.vision.draw.figures import Tile, panels, sheet, spread
from exp.vision.draw.pictures import enlarged, shrunk, to_rgb
from exp.vision.predict.images import check, chosen
from exp.vision.predict.inputs import each_of_mine, report_failures, tell_inputs
from exp.vision.predict.raster import check_pixels
from exp.vision.tiling import cells

if TYPE_CHECKING:
    from exp.session import Session
    from exp.vision.predict.inputs import Input

__all__ = ["FeatureFile", "FeatureWriter", "build", "image_features", "narrowed", "write_features"]

_WINDOW = 1024
_LONGEST = 1024  # pixels of an image beside its map


class FeatureFile(NamedTuple):
    """A row of ``features.csv``.

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


def build(session: Session) -> tuple[Any, Any]:
    """The data, and the model on the device.

    Raises:
        ConfigError: the model gives no features.
    """
    config = session.config
    record_environment(session)
    data: Any = build_data(session)
    model: Any = build_model(session, data).to(session.device)
    if not hasattr(model, "features"):
        raise ConfigError(f"model {config.model._target_} gives no features of images; use model=dinov3_scenes")
    check_placement(model, session.device, session.info.rank)
    model.eval()
    if config.compile:
        model.features = torch.compile(model.features)  # which is called, not the model
    return data, model


def write_features(session: Session) -> dict[str, Any]:
    """Features of the images of ``task.input`` (null: of the test split), each rank its share of the files.

    Writes ``features/<name>.safetensors`` and ``features.csv``; and for ``task.max_images`` of them, spread over all,
    ``plots/features/<name>.png``: the image beside its three leading principal components in red, green and blue. The
    components are those of all patches of all images, so that a color means the same everywhere.
    ``plots/features.png`` shows them on one sheet.

    Raises:
        ConfigError: a key of ``task`` is wrong, there are no images, or the model gives no features.
        RunError: images could not be read; the others are done.
    """
    task = session.config.task
    check(task)
    data, model = build(session)
    inputs, _ = chosen(task, data)
    session.begin()
    writer = FeatureWriter(session, model, getattr(data, "read_as_seen", data.read))
    failures = each_of_mine(session, inputs, writer.add)
    gathered = session.distributed.gather((writer.written, failures))
    files = [file for _, file in sorted(pair for part, _ in gathered for pair in part.items())]
    failed = [failure for _, part in gathered for failure in part]
    report = []
    if session.distributed.is_main and files:
        write_atomically(session.folder.path / "features.csv", csv_content([FeatureFile._fields, *files]))
        report = ["features.csv", *(file.features for file in files)]
    if files and task.max_images:
        components = writer.moments.components(session.distributed)  # every rank takes part
        if session.distributed.is_main:
            report += _draw(session, model, files, data.read, components)
    report_failures(failed, len(inputs), task.on_error)
    return make_result(
        session,
        {"images": len(files), "failed": len(failed)},
        None,
        files=report,
        data=tell_inputs(session, inputs, failed),
        measured_on="features",
        published=None,
    )


class FeatureWriter:
    """Computes and writes the features of one image after the other.

    Attributes:
        written: by the number of the image.
        moments: of the patches.

    Args:
        session: the session.
        model: has ``features`` (:class:`exp.vision.dinov3.base.ImageModel`).
        read: an image file as (H, W, C), 0..255.
    """

    def __init__(self, session: Session, model: Any, read: Any) -> None:
        self.session, self.model, self.read = session, model, read
        self.moments = Moments(int(model.backbone.embed_dim))
        self.written: dict[int, FeatureFile] = {}

    def add(self, number: int, entry: Input) -> None:
        """Write ``features/<name>.safetensors``: ``cls`` (D,), ``patches`` (h, w, D); metadata say what of.

        Raises:
            DataError: the image cannot be read.
            RunError: features are not finite, or too large for ``task.feature_dtype``.
        """
        task = self.session.config.task
        check_pixels(entry.path)
        pixels = resized(self.read(entry.path), task.resize)
        cls, patches = image_features(self.session, self.model, pixels, _WINDOW)
        tensors = {
            name: narrowed(f"{name} of {entry.path}", value.numpy(), task.feature_dtype)
            for name, value in (("cls", cls), ("patches", patches))
        }
        self.moments.add(patches)
        height, width = pixels.shape[:2]
        about = {"file": str(entry.path), "height": height, "width": width,
                 "patch_size": int(self.model.backbone.patch_size)}  # fmt: skip
        name = f"features/{entry.name}.safetensors"
        content = save(tensors, {key: to_json(value) for key, value in about.items()})
        write_atomically(self.session.folder.path / name, content)
        self.written[number] = FeatureFile(str(entry.path), name, height, width, *patches.shape[:2])


def narrowed(name: str, value: np.ndarray, dtype: str) -> np.ndarray:
    """Features, float32, in ``dtype``; ``name`` is for the error.

    Raises:
        RunError: they are not finite, or too large for it.
    """
    with np.errstate(over="ignore"):
        narrow: np.ndarray = value.astype(dtype)
    if not np.isfinite(narrow).all():
        raise RunError(
            f"features ({name}) are not finite in {dtype}: too large for it (take task.feature_dtype=float32), or "
            "weights that are not finite"
        )
    return narrow


def resized(pixels: np.ndarray, longer: int | None) -> np.ndarray:
    """The image with its longer side brought to ``longer`` pixels; None: as it is. The same dtype."""
    height, width = pixels.shape[:2]
    if longer is None or longer <= max(height, width):
        return shrunk(pixels, longer or max(height, width))
    size = [round(extent * longer / max(height, width)) for extent in (width, height)]
    return cv2.resize(pixels, size, interpolation=cv2.INTER_LINEAR).reshape(size[1], size[0], -1)


def image_features(session: Session, model: Any, pixels: np.ndarray, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of the last block.

    Args:
        session: the session.
        model: has ``features``.
        pixels: (H, W, C), 0..255.
        window: larger images are seen through windows of at most this side (:func:`exp.vision.tiling.cells`).

    Returns:
        ``cls`` (D,): of several windows, their mean by area. ``patches`` (ceil(H / patch), ceil(W / patch), D). Both
        float32, on the CPU.
    """
    patch = int(model.backbone.patch_size)
    rows, columns = (-(-extent // patch) for extent in pixels.shape[:2])
    image = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).unsqueeze(0)
    cls, patches = torch.zeros(()), torch.zeros(())
    for tall, above in cells(rows, max(window // patch, 1)):
        for wide, around in cells(columns, max(window // patch, 1)):
            part = image[..., above.start * patch : above.stop * patch, around.start * patch : around.stop * patch]
            with torch.no_grad(), session.backend.autocast(session.config.precision):
                (found,) = model.features(part.to(session.device))
            inner = found.patches[0].float().cpu()
            if not patches.dim():
                patches = torch.empty(rows, columns, inner.shape[-1])
            patches[tall, wide] = inner[tall.start - above.start : tall.stop - above.start,
                                        wide.start - around.start : wide.stop - around.start]  # fmt: skip
            share = (tall.stop - tall.start) * (wide.stop - wide.start) / (rows * columns)
            cls = cls + share * found.cls[0].float().cpu()
            session.backend.end_batch()
    return cls, patches


def _draw(session: Session, model: Any, files: list[FeatureFile], read: Any, components: Components) -> list[str]:
    """Maps of some images, and a sheet of them."""
    pictures, patch, tiles, drawn = PictureWriter(session), int(model.backbone.patch_size), [], []
    for number in spread(len(files), session.config.task.max_images):
        entry = files[number]
        pixels = resized(read(Path(entry.file)), session.config.task.resize)
        picture = enlarged(to_rgb(shrunk(pixels, _LONGEST)), 256)
        patches = load_file(str(session.folder.path / entry.features))["patches"]
        shown = components.picture(patches, picture.shape[0], picture.shape[1], patch * picture.shape[1] / entry.width)
        pair, name = panels([picture, shown]), Path(entry.features).stem
        drawn += pictures.write(f"plots/features/{name}.png", pair)
        tiles.append(Tile(pair, [name]))
    shares = ", ".join(f"{100 * share:.0f} %" for share in components.explained)
    title = f"Principal components of the patch features in red, green, blue: {shares} of the variance"
    return drawn + pictures.write("plots/features.png", sheet(tiles, side=440, title=title))
