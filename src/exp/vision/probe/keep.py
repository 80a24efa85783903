"""task=features task.store=<folder>: the features of all images of the data, kept for probes."""

from __future__ import annotations

import hashlib
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator

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
from exp.vision.draw.pictures import resized_labels
from exp.vision.features import build, narrowed
from exp.vision.probe.store import BLOCK, ArraySpec, Store

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["keep_features"]


def keep_features(session: Session) -> dict[str, Any]:
    """Compute what the folder does not have yet, each rank its share of the blocks.

    Every split is seen through the evaluation pipeline; features are of the model's ``blocks``.

    Raises:
        ConfigError: the folder holds other features, another run is writing to it, or the images are of different sizes
            where patches are kept.
        RunError: a feature is not finite.
    """
    task, distributed = session.config.task, session.distributed
    data, model = build(session)
    splits = data.plain_parts()
    kinds, folder = ["cls", "mean", *(["patches"] if task.patches else [])], Path(task.store)
    trouble, skipped, lock = None, {}, RunLock(folder, key="task.store")
    try:
        if distributed.is_main:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock.acquire()  # another run would begin it anew, or compute the same blocks
                _open_or_make(session, data, model, splits, kinds)
            except ConfigError as error:
                trouble = error
        trouble = distributed.gather(trouble)[0]  # every rank has to hear of it
        if trouble is not None:
            raise trouble
        total, seconds = _compute(session, data, model, splits)
        if distributed.is_main:
            skipped = _report_skipped(session, splits)
    finally:
        lock.release()
    return make_result(
        session,
        {"images": sum(map(len, splits.values())), "computed": total},
        None,
        files=[],
        store=str(folder),
        data={**{name: len(dataset) for name, dataset in splits.items()}, **skipped},
        fingerprint=Store(folder).used(),
        samples_per_second=total / seconds if total else None,
        measured_on="features",
        published=None,
    )


def _report_skipped(session: Session, splits: dict[str, Any]) -> dict[str, Any]:
    """Log the images that could not be used, now or when the store was begun, and keep them in ``about.json``.

    Returns:
        ``{"skipped": {"count", "files"}}`` as the result of a training has it; empty where there is none.
    """
    store = Store(session.config.task.store)
    numbers = [(name, int(each)) for name in splits for each in np.flatnonzero(np.array(store.array(name, "skipped")))]
    if not numbers:
        return {}
    files = [splits[name].reason(number) for name, number in numbers[:NAMED_FILES]]
    session.say(f"{len(numbers)} images could not be used, and are left out: {files[0]}")
    found = {"skipped": {"count": len(numbers), "files": files}}
    write_json(store.folder / "about.json", {**store.about, **found})
    return found


def _compute(session: Session, data: Any, model: Any, splits: dict[str, Any]) -> tuple[int, float]:
    """Compute the blocks that the store lacks, each rank its share: how many images, and in how many seconds."""
    distributed, store = session.distributed, Store(session.config.task.store)
    missing = distributed.gather([(name, number) for name in splits for number in store.missing(name)])[0]
    mine = missing[distributed.rank :: distributed.world_size]
    blocks = sum(-(-len(dataset) // BLOCK) for dataset in splits.values())
    session.say(
        f"{console.shown(store.folder)} has {blocks - len(missing)} of {blocks} blocks of features"
        + ("; nothing is left to compute" if not missing else "")
    )
    session.begin()
    began, computed = time.perf_counter(), 0
    for name, dataset in splits.items():
        numbers = [number for split, number in mine if split == name]
        for number, values in _blocks(session, data, dataset, model, numbers, store.about["kinds"]):
            skipped = dataset.skipped[number * BLOCK : (number + 1) * BLOCK].numpy().astype(np.uint8)
            store.write_block(name, number, {**values, "skipped": skipped})
            computed += len(skipped)
    return sum(distributed.gather(computed)), time.perf_counter() - began


def _open_or_make(session: Session, data: Any, model: Any, splits: dict[str, Any], kinds: list[str]) -> None:
    """Check the store that is there, or make an empty one."""
    config, folder = session.config, session.config.task.store
    fingerprint = _fingerprint(session, data, model, splits)
    if (Path(folder) / "about.json").exists():
        store = Store(folder)
        if store.begun():
            store.check(fingerprint, kinds)
            return
    first = next(iter(splits.values()))
    batch = next(iter(device_loader(first, [torch.arange(min(2, len(first)))], 0, session)))
    made = _of_batch(session, model, batch, kinds)
    arrays = {name: ArraySpec(value.shape[1:], str(value.dtype)) for name, value in made.items()}
    about = {
        "experiment": config.name,
        "classes": list(data.classes),
        "patch_size": int(model.backbone.patch_size),
        "weights": OmegaConf.to_container(config.record.weights) or {"source": config.init_from},
        "fingerprint": fingerprint,
    }
    Store.prepare(folder, about, arrays, {name: len(dataset) for name, dataset in splits.items()})


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


def _blocks(
    session: Session, data: Any, dataset: Any, model: Any, numbers: list[int], kinds: list[str]
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """The given blocks of a split; no more than one of them is in memory."""
    count, size = len(dataset), data.eval_batch_size
    batches = [
        (number, torch.arange(begin, min(begin + size, (number + 1) * BLOCK, count)))
        for number in numbers
        for begin in range(number * BLOCK, min((number + 1) * BLOCK, count), size)
    ]
    loader = device_loader(dataset, [indices for _, indices in batches], data.num_workers, session)
    for number, several in itertools.groupby(zip(batches, loader), key=lambda each: each[0][0]):
        held = [_of_batch(session, model, batch, kinds) for _, batch in several]
        yield number, {name: np.concatenate([values[name] for values in held]) for name in held[0]}


def _of_batch(session: Session, model: Any, batch: Any, kinds: list[str]) -> dict[str, np.ndarray]:
    """Features and labels of a batch, on the CPU."""
    image = batch["image"].to(session.device)
    shape = tuple(image.shape[-2:])
    if "patches" in kinds and any(tuple(size) != shape for size in batch.get("sizes", ())):
        raise ConfigError(
            "task.patches=true needs images of one size; give data.eval_pipeline a Resize(keep_ratio=false) or a crop"
        )
    with torch.no_grad(), session.backend.autocast(session.config.precision):
        found = model.features(image, model.blocks)
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
    arrays["labels"] = labels
    return arrays
