"""task=features: write features of images as files, with plots of their principal components, or to a feature store."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
from omegaconf import OmegaConf
from safetensors.numpy import load_file, save

from exp.data.loader import device_loader
from exp.engine.build import build_data, build_model
from exp.engine.result import make_result, write_picture
from exp.errors import ConfigError, RunError
from exp.runs.files import csv_content, to_json, write_atomically, write_json
from exp.runs.lock import RunLock
from exp.vision.data.layouts import NAMED_FILES
from exp.vision.feature_store import DONE, SKIPPED, TO_DO, FeatureStore, order_digest
from exp.vision.plots import Tile, contact_sheet, evenly_spaced, panels
from exp.vision.predict import map_rank_shard, report_failures, resolve_inputs
from exp.vision.raster import check_pixels
from exp.vision.rendering import enlarge, resize_labels, shrink, to_rgb
from exp.vision.tiling import patch_windows

if TYPE_CHECKING:
    from exp.distributed import Distributed
    from exp.session import Session
    from exp.vision.predict import Input

__all__ = ["Components", "image_features", "store_features", "write_features", "write_image"]

_COLUMNS = ["file", "features", "height", "width", "rows", "columns"]
_WINDOW = 1024
_DEVIATIONS = 2.0  # standard deviations from the mean of a component to its darkest and brightest color
_LONGEST = 1024  # most pixels of the longer side of an image beside its map


def _build(session: Session) -> tuple[Any, Any]:
    """The data, and the model on the device.

    Raises:
        ConfigError: the model has no method ``features``.
    """
    config = session.config
    data: Any = build_data(session)
    model: Any = build_model(session, data).to(session.device)
    if not hasattr(model, "features"):
        raise ConfigError(f"model {config.model._target_} gives no features of images: it has no method features")
    model.eval()
    return data, model


def write_features(session: Session) -> dict[str, Any]:
    """Compute features of the images of ``task.input`` (null: of the test split); each rank takes a share of the files.

    Writes ``features/<name>.safetensors`` and ``features.csv``. For ``task.max_images`` images, evenly spaced, also
    ``plots/features/<name>.png``: the image beside its three leading principal components in red, green and blue. The
    components are those of all patches of all images, so that a color has the same meaning in all plots.
    ``plots/features.png`` shows them on one sheet.

    Raises:
        ConfigError: a key of ``task`` is wrong, there are no images, or the model has no features.
        RunError: images could not be read; the features of the others are written.
    """
    task = session.config.task
    data, model = _build(session)
    inputs, _ = resolve_inputs(session, data)
    session.start_run()
    read, components = getattr(data, "read_model_input", data.read), Components(model.backbone.level_channels[-1])
    written: dict[int, list[Any]] = {}

    def write(number: int, entry: Input) -> None:
        written[number], patches = write_image(session, model, read, entry)
        components.add(patches)

    files, failed, _ = map_rank_shard(session, inputs, write, written)
    report = []
    if files and task.max_images:
        components.fit(session.distributed)  # every rank takes part
    if session.distributed.is_main and files:
        write_atomically(session.folder.path / "features.csv", csv_content([_COLUMNS, *files]))
        report = ["features.csv", *(file[1] for file in files)]
        if task.max_images:
            report += _draw(session, model, files, data.read, components)
    report_failures(failed, len(inputs))
    return make_result(
        session,
        {"images": len(files), "failed": len(failed)},
        None,
        files=report,
        data={key: value for key, value in data.record(session.distributed.gather).items() if key == "normalization"},
        measured_on="features",
        published=None,
    )


def write_image(session: Session, model: Any, read: Any, entry: Input) -> tuple[list[Any], torch.Tensor]:
    """Write ``features/<name>.safetensors``: ``cls`` (D,), ``patches`` (h, w, D), and metadata of the image.

    Args:
        session: the session.
        model: has ``features`` of images.
        read: reads an image file as (H, W, C), 0..255.
        entry: the image.

    Returns:
        Its row of ``features.csv``, and the features of its patches (h, w, D).

    Raises:
        DataError: the image cannot be read.
        RunError: features are not finite, or too large for ``task.feature_dtype``.
    """
    check_pixels(entry.path)
    pixels = read(entry.path)
    cls, patches = image_features(session, model, pixels, _WINDOW)
    tensors = {
        name: _cast(f"{name} of {entry.path}", value.numpy(), session.config.task.feature_dtype)
        for name, value in (("cls", cls), ("patches", patches))
    }
    (height, width), patch = pixels.shape[:2], model.backbone.level_strides[-1]
    about = {"file": str(entry.path), "height": height, "width": width, "patch_size": patch}
    name = f"features/{entry.name}.safetensors"
    content = save(tensors, {key: to_json(value) for key, value in about.items()})
    write_atomically(session.folder.path / name, content)
    return [str(entry.path), name, height, width, *patches.shape[:2]], patches


def _cast(name: str, value: np.ndarray, dtype: str) -> np.ndarray:
    """Convert features from float32 to ``dtype``; ``name`` is for the error.

    Raises:
        RunError: features are not finite, or too large for ``dtype``.
    """
    with np.errstate(over="ignore"):
        narrow: np.ndarray = value.astype(dtype)
    if not np.isfinite(narrow).all():
        raise RunError(
            f"features ({name}) are not finite in {dtype}: too large for it (take task.feature_dtype=float32), or "
            "weights that are not finite"
        )
    return narrow


def image_features(session: Session, model: Any, pixels: np.ndarray, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of the last level for one image.

    Args:
        session: the session.
        model: has ``features``.
        pixels: (H, W, C), 0..255.
        window: most pixels along a side; larger images are cut into windows (:func:`exp.vision.tiling.patch_windows`).

    Returns:
        ``cls`` (D,), with several windows their mean weighted by area, of a backbone without CLS token the mean of the
        patches; ``patches`` (ceil(H / patch), ceil(W / patch), D). Both float32, on the CPU.
    """
    strides = model.backbone.level_strides
    patch = strides[-1]
    rows, columns = (-(-extent // patch) for extent in pixels.shape[:2])
    image = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).unsqueeze(0)
    cls, patches = torch.zeros(()), torch.zeros(())
    for tall, row_window in patch_windows(rows, max(window // patch, 1)):
        for wide, column_window in patch_windows(columns, max(window // patch, 1)):
            top, left = row_window.start, column_window.start
            part = image[..., top * patch : row_window.stop * patch, left * patch : column_window.stop * patch]
            with torch.no_grad(), session.backend.autocast(session.config.precision):
                features = model.features(part.to(session.device), [len(strides) - 1])
            inner = features.maps[0][0].permute(1, 2, 0).float().cpu()
            if not patches.dim():
                patches = torch.empty(rows, columns, inner.shape[-1])
            patches[tall, wide] = inner[tall.start - top : tall.stop - top, wide.start - left : wide.stop - left]
            share = (tall.stop - tall.start) * (wide.stop - wide.start) / (rows * columns)
            cls = cls + share * features.tokens()[0][0].float().cpu()
            session.backend.end_batch()
    return cls, patches


def _draw(session: Session, model: Any, files: list[Any], read: Any, components: Components) -> list[str]:
    """Draw the maps of some images, and a contact sheet; returns the files."""
    patch, tiles, plot_files = model.backbone.level_strides[-1], [], []
    for number in evenly_spaced(len(files), session.config.task.max_images):
        file, features, _, width, *_ = files[number]
        picture = enlarge(to_rgb(shrink(read(Path(file)), _LONGEST)), 256)
        patches = load_file(str(session.folder.path / features))["patches"]
        colors = components.picture(patches, picture.shape[0], picture.shape[1], patch * picture.shape[1] / width)
        pair, name = panels([picture, colors]), Path(features).stem
        plot_files += write_picture(session, f"plots/features/{name}.png", pair)
        tiles.append(Tile(pair, [name]))
    shares = ", ".join(f"{100 * share:.0f} %" for share in components.explained)
    title = f"Principal components of the patch features in red, green, blue: {shares} of the variance"
    return plot_files + write_picture(session, "plots/features.png", contact_sheet(tiles, side=440, title=title))


class Components:
    """The three leading principal components of features, as colors.

    Count, mean and covariance are summed up on the CPU, so that no feature is kept. The sums are float64: some elements
    of a vision transformer's features are a hundred times larger than others, and in float32 subtracting the mean would
    lose the small ones.

    Attributes:
        mean: float32 (D,); like the others, available after :meth:`fit`.
        axes: unit vectors, float32 (3, D).
        deviation: standard deviation along each axis, float32 (3,).
        explained: share of the variance along each axis.

    Args:
        dim: elements of a feature (D).
    """

    def __init__(self, dim: int) -> None:
        self._sums = torch.zeros((dim + 1, dim + 1), dtype=torch.float64)  # of [x, 1] [x, 1]^T

    def add(self, features: torch.Tensor) -> None:
        """Add features (..., D), any floating dtype and device."""
        flat = features.reshape(-1, features.shape[-1]).float().cpu().double()
        flat = torch.cat([flat, flat.new_ones((len(flat), 1))], dim=1)
        self._sums += flat.t() @ flat

    def fit(self, distributed: Distributed) -> Components:
        """Compute the eigenvectors of the covariance over all ranks. Every rank must call this.

        The sign of each, which is arbitrary, is chosen so that its largest element is positive.
        """
        sums = distributed.sum(self._sums)
        mean = sums[-1, :-1] / sums[-1, -1]
        values, vectors = torch.linalg.eigh(sums[:-1, :-1] / sums[-1, -1] - torch.outer(mean, mean))  # ascending
        axes, variance = vectors[:, -3:].flip(-1).t(), values[-3:].flip(-1).clamp(min=0.0)
        strongest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
        self.mean, self.axes = mean.float().numpy(), (axes * torch.where(strongest < 0, -1.0, 1.0)).float().numpy()
        self.deviation = variance.sqrt().float().numpy()
        self.explained = (variance / values.clamp(min=0.0).sum().clamp(min=1e-30)).tolist()
        return self

    def picture(self, patches: np.ndarray, height: int, width: int, patch_size: float) -> np.ndarray:
        """A color map of the features of an image, up-sampled to its pixels.

        In each color channel the mean feature is half of full brightness; two standard deviations away are 0 and full.

        Args:
            patches: (h, w, D).
            height: of the image in pixels.
            width: of the image in pixels.
            patch_size: side of a patch in pixels; the last patches may extend beyond the image.

        Returns:
            RGB (height, width, 3), uint8.
        """
        along = (patches.astype(np.float32) - self.mean) @ self.axes.T
        colors = np.clip(0.5 + along / np.maximum(2.0 * _DEVIATIONS * self.deviation, 1e-12), 0.0, 1.0)
        size = (round(patches.shape[1] * patch_size), round(patches.shape[0] * patch_size))
        colors = (colors * 255.0).round().astype(np.uint8)
        return cv2.resize(colors, size, interpolation=cv2.INTER_CUBIC)[:height, :width]


def store_features(session: Session) -> dict[str, Any]:
    """Compute the features that the store ``task.store`` lacks; each rank takes a share of the batches.

    All splits go through ``data.eval_pipeline``; features are those of ``model.out_indices``.

    Raises:
        ConfigError: the store has other features, another run is writing to it, or with ``task.patches=true`` images or
            the cells of levels have different sizes.
        RunError: a feature is not finite.
    """
    distributed, folder = session.distributed, Path(session.config.task.store)
    data, model = _build(session)
    strides = model.backbone.strides
    if session.config.task.patches and len(set(strides)) > 1:
        raise ConfigError(
            f"task.patches=true: the levels {list(model.out_indices)} of the backbone have cells of {strides} pixels, "
            "so that their features make no patch together; choose levels of one size, such as "
            f"model.backbone.out_indices=[{model.out_indices[-1]}]",
            key="model.backbone.out_indices",
        )
    splits = data.eval_splits()
    skipped, lock = {}, RunLock(folder, key="task.store")

    def open_store() -> None:
        lock.acquire()  # another run would overwrite it, or compute the same batches
        _open_or_create(session, data, model, splits)

    try:
        distributed.on_main(open_store)
        total, seconds = _compute(session, data, model, splits)
        store = FeatureStore(folder)
        skipped_images = store.images(SKIPPED)
        if skipped_images:
            files = [splits[split].samples[number][0] for split, number in skipped_images[:NAMED_FILES]]
            session.print(f"{len(skipped_images)} images are skipped, since they could not be used: {files[0]}")
            skipped = {"skipped": {"count": len(skipped_images), "files": files}}
        if skipped_images and distributed.is_main:
            write_json(folder / "about.json", {**store.about, **skipped})
    finally:
        lock.release()
    return make_result(
        session,
        {"images": sum(map(len, splits.values())), "computed": total},
        None,
        files=[],
        store=str(folder),
        data={**{name: len(dataset) for name, dataset in splits.items()}, **skipped},
        fingerprint=store.used(),
        samples_per_second=total / seconds if total else None,
        measured_on="features",
        published=None,
    )


def _compute(session: Session, data: Any, model: Any, splits: dict[str, Any]) -> tuple[int, float]:
    """Compute the batches that the store lacks; returns the number of images over all ranks, and seconds."""
    distributed, store, size = session.distributed, FeatureStore(session.config.task.store), data.eval_batch_size
    missing = distributed.gather(store.images(TO_DO))[0]
    session.print(
        f"{store.folder} lacks the features of {len(missing)} of {sum(map(len, splits.values()))} images"
        + ("" if missing else "; nothing is left to compute")
    )
    session.start_run()
    start, computed = time.perf_counter(), 0
    for split, dataset in splits.items():
        to_do = torch.tensor([number for name, number in missing if name == split], dtype=torch.int64)
        batches = to_do.split(size)[distributed.rank :: distributed.world_size] if len(to_do) else ()
        for numbers, batch in zip(batches, device_loader(dataset, batches, data.num_workers, session)):
            values = _batch_arrays(session, model, batch)
            skipped = dataset.skipped[numbers].numpy()
            store.write(split, numbers.tolist(), {**values, "state": np.where(skipped, SKIPPED, DONE)})
            computed += len(skipped)
    return sum(distributed.gather(computed)), time.perf_counter() - start


def _open_or_create(session: Session, data: Any, model: Any, splits: dict[str, Any]) -> None:
    """Check an existing store, or make an empty one."""
    config, folder = session.config, Path(session.config.task.store)
    fingerprint = _fingerprint(session, data, model, splits)
    if (folder / "about.json").exists():
        store = FeatureStore(folder)
        if any(store.array(split, "state").any() for split in store.about["splits"]):  # else it is empty
            store.check(fingerprint, _kinds(session))
            return
    first = next(iter(splits.values()))
    batch = next(iter(device_loader(first, [torch.arange(min(2, len(first)))], 0, session)))
    about = {
        "experiment": config.name,
        "classes": list(data.classes),
        "patch_size": model.backbone.strides[0],
        "channels": list(model.backbone.level_channels),
        "weights": OmegaConf.to_container(config.record.weights) or {"source": config.init_from},
        "fingerprint": fingerprint,
    }
    counts = {name: len(dataset) for name, dataset in splits.items()}
    FeatureStore.create(folder, about, _batch_arrays(session, model, batch), counts)


def _kinds(session: Session) -> list[str]:
    return ["cls", "mean", *(["patches"] if session.config.task.patches else [])]


def _fingerprint(session: Session, data: Any, model: Any, splits: dict[str, Any]) -> dict[str, Any]:
    """Digests of everything that features depend on: ``weights``, ``preprocessing`` and ``data``."""
    config = session.config
    digest = hashlib.sha256()
    for name, value in sorted(model.backbone.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)}".encode() + value.detach().float().cpu().numpy().tobytes())
    preprocessing = {
        **{key: value for key, value in data.state_dict().items() if key != "classes"},
        "eval_pipeline": OmegaConf.to_container(config.data.eval_pipeline, resolve=True),
        "mean": [round(value, 3) for value in model.pixel_mean.flatten().tolist()],
        "std": [round(value, 3) for value in model.pixel_std.flatten().tolist()],
        "out_indices": list(model.out_indices),
        "precision": config.precision,
        "dtype": config.task.feature_dtype,
    }
    files = {name: list(entry) for name, entry in (data.fingerprint() or {}).items()}
    files.update({f"the list of {name}": order_digest(dataset.samples) for name, dataset in splits.items()})
    return {"weights": {"sha256": digest.hexdigest()}, "preprocessing": preprocessing, "data": files}


def _batch_arrays(session: Session, model: Any, batch: Any) -> dict[str, np.ndarray]:
    """Features and labels of a batch, on the CPU."""
    kinds, shape = _kinds(session), tuple(batch["image"].shape[-2:])
    if "patches" in kinds and any(tuple(size) != shape for size in batch.get("sizes", ())):
        raise ConfigError(
            "task.patches=true needs images of one size; give data.eval_pipeline a Resize(keep_ratio=false) or a crop"
        )
    with torch.no_grad(), session.backend.autocast(session.config.precision):
        features = model.features(batch["image"].to(session.device), model.out_indices)
    values = {
        "cls": features.tokens(),
        "mean": features.means(),
        "patches": [level.permute(0, 2, 3, 1).float() for level in features.maps],
    }
    arrays = {name: torch.cat(values[name], dim=-1).cpu().numpy() for name in kinds}
    session.backend.end_batch()
    arrays = {name: _cast(name, value, session.config.task.feature_dtype) for name, value in arrays.items()}
    labels = batch["label"].cpu().numpy()
    if labels.ndim == 3 and "patches" not in kinds:
        labels = np.full(len(labels), -1, np.int64)
    elif "label_sizes" in batch:  # labels at the resolution of the file -> at that of the patches' image
        label_pairs = zip(labels, batch["label_sizes"])
        labels = np.stack([resize_labels(label[:height, :width], *shape) for label, (height, width) in label_pairs])
    return {**arrays, "labels": labels}
