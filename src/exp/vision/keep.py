"""task=features task.store=<folder>: the features of all images of the data, kept for probes."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import OmegaConf

from exp import console
from exp.data.loader import device_loader
from exp.engine.building import make_result
from exp.errors import ConfigError
from exp.runs.files import write_json
from exp.runs.lock import RunLock
from exp.vision.data.layouts import NAMED_FILES
from exp.vision.features import build, narrowed
from exp.vision.pictures import resized_labels
from exp.vision.store import DONE, TO_DO, UNUSABLE, Store

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["keep_features"]


def keep_features(session: Session) -> dict[str, Any]:
    """Compute what the folder does not have yet, each rank its share of the batches.

    Every split is seen through the evaluation pipeline; features are of the model's ``blocks``.

    Raises:
        ConfigError: the folder holds other features, another run is writing to it, or the images are of different sizes
            where patches are kept.
        RunError: a feature is not finite.
    """
    distributed, folder = session.distributed, Path(session.config.task.store)
    data, model = build(session)
    splits = data.plain_parts()
    trouble, skipped, lock = None, {}, RunLock(folder, key="task.store")
    try:
        if distributed.is_main:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock.acquire()  # another run would begin it anew, or compute the same batches
                _open_or_make(session, data, model, splits)
            except ConfigError as error:
                trouble = error
        trouble = distributed.gather(trouble)[0]  # every rank has to hear of it
        if trouble is not None:
            raise trouble
        total, seconds = _compute(session, data, model, splits)
        store = Store(folder)
        unusable = store.images(UNUSABLE)
        if unusable:
            files = [splits[split].reason(number) for split, number in unusable[:NAMED_FILES]]
            session.say(f"{len(unusable)} images could not be used, and are left out: {files[0]}")
            skipped = {"skipped": {"count": len(unusable), "files": files}}
        if unusable and distributed.is_main:
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
    """Compute the batches that the store lacks, each rank its share: how many images, and in how many seconds."""
    distributed, store, size = session.distributed, Store(session.config.task.store), data.eval_batch_size
    lacking = distributed.gather(store.images(TO_DO))[0]
    batches = sorted({(split, number // size * size) for split, number in lacking})
    mine = batches[distributed.rank :: distributed.world_size]
    session.say(
        f"{console.shown(store.folder)} lacks the features of {len(lacking)} of {sum(map(len, splits.values()))} images"
        + ("" if lacking else "; nothing is left to compute")
    )
    session.begin()
    began, computed = time.perf_counter(), 0
    for split, dataset in splits.items():
        firsts = [first for name, first in mine if name == split]
        indices = [torch.arange(first, min(first + size, len(dataset))) for first in firsts]
        for first, batch in zip(firsts, device_loader(dataset, indices, data.num_workers, session)):
            values = _of_batch(session, model, batch)
            skipped = dataset.skipped[first : first + len(values["labels"])].numpy()
            store.write(split, first, {**values, "state": np.where(skipped, UNUSABLE, DONE)})
            computed += len(skipped)
    return sum(distributed.gather(computed)), time.perf_counter() - began


def _open_or_make(session: Session, data: Any, model: Any, splits: dict[str, Any]) -> None:
    """Check the store that is there, or make an empty one."""
    config, folder = session.config, Path(session.config.task.store)
    fingerprint = _fingerprint(session, data, model, splits)
    if (folder / "about.json").exists():
        store = Store(folder)
        if any(store.array(split, "state").any() for split in splits):  # else a refused run has left it
            store.check(fingerprint, _kinds(session))
            return
    first = next(iter(splits.values()))
    batch = next(iter(device_loader(first, [torch.arange(min(2, len(first)))], 0, session)))
    about = {
        "experiment": config.name,
        "classes": list(data.classes),
        "patch_size": int(model.backbone.patch_size),
        "weights": OmegaConf.to_container(config.record.weights) or {"source": config.init_from},
        "fingerprint": fingerprint,
    }
    counts = {name: len(dataset) for name, dataset in splits.items()}
    Store.prepare(folder, about, _of_batch(session, model, batch), counts)


def _kinds(session: Session) -> list[str]:
    return ["cls", "mean", *(["patches"] if session.config.task.patches else [])]


def _fingerprint(session: Session, data: Any, model: Any, splits: dict[str, Any]) -> dict[str, Any]:
    """What features depend on: ``weights``, ``preprocessing`` and ``data``."""
    config = session.config
    digest = hashlib.sha256()
    for name, value in sorted(model.backbone.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)}".encode() + value.detach().float().cpu().numpy().tobytes())
    preprocessing = {
        **{key: value for key, value in data.state_dict().items() if key != "classes"},
        "stretch": None if config.data.stretch is None else list(config.data.stretch),
        "eval_pipeline": OmegaConf.to_container(config.data.eval_pipeline, resolve=True),
        "mean": [round(value, 3) for value in model.pixel_mean.flatten().tolist()],
        "std": [round(value, 3) for value in model.pixel_std.flatten().tolist()],
        "blocks": list(model.blocks),
        "precision": config.precision,
        "dtype": config.task.feature_dtype,
    }
    files = {name: list(entry) for name, entry in (data.fingerprint() or {}).items()}
    files.update({f"the list of {name}": _in_order(dataset.samples) for name, dataset in splits.items()})
    return {"weights": {"sha256": digest.hexdigest()}, "preprocessing": preprocessing, "data": files}


def _in_order(samples: Any) -> list[Any]:
    """Which image is at which place of the arrays, as an entry of a fingerprint; where the files lie plays no part."""
    digest = hashlib.sha256()
    for path, label in samples:
        shown = "" if isinstance(label, str) else label
        digest.update(f"{Path(path).parent.name}/{Path(path).name}\0{shown}\n".encode("utf-8", "surrogateescape"))
    return [len(samples), 0, digest.hexdigest()]


def _of_batch(session: Session, model: Any, batch: Any) -> dict[str, np.ndarray]:
    """Features and labels of a batch, on the CPU."""
    kinds, shape = _kinds(session), tuple(batch["image"].shape[-2:])
    if "patches" in kinds and any(tuple(size) != shape for size in batch.get("sizes", ())):
        raise ConfigError(
            "task.patches=true needs images of one size; give data.eval_pipeline a Resize(keep_ratio=false) or a crop"
        )
    with torch.no_grad(), session.backend.autocast(session.config.precision):
        found = model.features(batch["image"].to(session.device), model.blocks)
    values = {
        "cls": [features.cls.float() for features in found],
        "mean": [features.patches.float().mean(dim=(1, 2)) for features in found],
        "patches": [features.patches.float() for features in found],
    }
    held = {name: torch.cat(values[name], dim=-1).cpu().numpy() for name in kinds}
    session.backend.end_batch()
    arrays = {name: narrowed(name, value, session.config.task.feature_dtype) for name, value in held.items()}
    labels = batch["label"].cpu().numpy()
    if labels.ndim == 3 and "patches" not in kinds:
        labels = np.full(len(labels), -1, np.int64)
    elif "label_sizes" in batch:  # of the files' pixels: those of the patches are the image's
        each = zip(labels, batch["label_sizes"])
        labels = np.stack([resized_labels(label[:height, :width], *shape) for label, (height, width) in each])
    return {**arrays, "labels": labels}
