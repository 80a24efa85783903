"""task=features task.store=<folder>: the features of all images of the data, kept for probes."""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator

import numpy as np
import torch
from omegaconf import OmegaConf

from exp import console
from exp.data.loader import device_loader
from exp.engine.building import fingerprint_of, make_result
from exp.errors import ConfigError
from exp.runfolder import to_json
from exp.runlock import RunLock
from exp.vision.data.layouts import NAMED_FILES
from exp.vision.draw.pictures import resized_labels
from exp.vision.narrowing import narrowed
from exp.vision.probe.store import BLOCK, ArraySpec, Store

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["keep_features"]


def keep_features(session: Session, data: Any, model: Any) -> dict[str, Any]:
    """Compute what the folder does not have yet, each rank its share of the blocks.

    Args:
        session: the session.
        data: an :class:`exp.vision.data.base.ImageData`; every part is seen through its evaluation pipeline.
        model: an :class:`exp.vision.dinov3.base.ImageModel`, on the device; the features are of its ``blocks``.

    Raises:
        ConfigError: the folder holds other features, another run is writing to it, or the images are of different sizes
            where patches are kept.
        RunError: a feature is not finite.
    """
    task, distributed = session.config.task, session.distributed
    parts = {part: dataset for part, dataset in data.plain_parts().items() if task.parts is None or part in task.parts}
    if not parts:
        raise ConfigError(f"task.parts={list(task.parts)} names none of the parts of the data: train, val, test")
    kinds = ["cls", "mean", *(["patches"] if task.patches else [])]
    folder, fingerprint = Path(task.store), None
    with _alone_in(folder) if distributed.is_main else contextlib.nullcontext() as trouble:
        if distributed.is_main and trouble is None:
            fingerprint = _fingerprint(session, data, model, parts)
            try:
                _open_or_make(session, data, model, parts, fingerprint, kinds)
            except ConfigError as error:
                trouble = error
        trouble = distributed.gather(trouble)[0]
        if trouble is not None:
            raise trouble
        total, seconds = _compute(session, data, model, parts)
        skipped = _told_skipped(session, parts) if distributed.is_main else None
    return make_result(
        session,
        {"images": sum(len(dataset) for dataset in parts.values()), "computed": total},
        None,
        files=[],
        store=str(folder),
        data={**{part: len(dataset) for part, dataset in parts.items()}, **(skipped or {})},
        fingerprint=None if fingerprint is None else _in_short(fingerprint),  # only rank 0 has asked
        samples_per_second=total / seconds if total else None,
        measured_on="features",
        published=None,
    )


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[ConfigError | None]:
    """Keep other runs out of a store, which would begin it anew or compute the same blocks.

    Yields:
        What to say where another run is in it: every rank has to hear of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock, trouble = RunLock(folder, key="task.store"), None
    try:
        lock.acquire()
    except ConfigError as error:
        trouble = error
    try:
        yield trouble
    finally:
        lock.release()
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()


def _told_skipped(session: Session, parts: dict[str, Any]) -> dict[str, Any]:
    """What of the images could not be used, now or when the store was begun; said, and kept in ``about.json``.

    Returns:
        ``{"skipped": {"count", "files"}}`` as the result of a training has it; empty where there is none.
    """
    store = Store(session.config.task.store)
    numbers = [(part, number) for part, found in store.skipped().items() if part in parts for number in found]
    if not numbers:
        return {}
    files = [parts[part].reason(number) for part, number in numbers[:NAMED_FILES]]
    store.tell_skipped(len(numbers), files)
    session.say(f"{len(numbers)} images could not be used, and are left out: {files[0]}")
    return store.told_skipped()


def _compute(session: Session, data: Any, model: Any, parts: dict[str, Any]) -> tuple[int, float]:
    """Compute the blocks that the store does not have yet, each rank its share.

    Returns:
        How many images, and in how many seconds.
    """
    distributed, store = session.distributed, Store(session.config.task.store)
    missing = distributed.gather([(part, number) for part in parts for number in store.missing(part)])[0]
    mine = missing[distributed.rank :: distributed.world_size]
    blocks = sum(-(-len(dataset) // BLOCK) for dataset in parts.values())
    session.say(
        f"{console.shown(store.folder)} has {blocks - len(missing)} of {blocks} blocks of features"
        + ("; nothing is left to compute" if not missing else "")
    )
    session.begin()
    began, computed = time.perf_counter(), 0
    for part, dataset in parts.items():
        numbers = [number for name, number in mine if name == part]
        for number, values in _blocks(session, data, dataset, model, numbers, store.about["kinds"]):
            values["skipped"] = _skipped_in(dataset, number)
            store.write_block(part, number, values)
            computed += len(values["labels"])
    return sum(distributed.gather(computed)), time.perf_counter() - began


def _skipped_in(dataset: Any, block: int) -> np.ndarray:
    """Which images of a block could not be used: uint8 (n,)."""
    found: np.ndarray = dataset.skipped[block * BLOCK : (block + 1) * BLOCK].numpy().astype(np.uint8)
    return found


def _in_short(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """For ``result.json``: one digest for all files of the data."""
    files = hashlib.sha256(to_json(fingerprint["data"], sort_keys=True).encode()).hexdigest()
    return {**fingerprint, "data": {"sha256": files}}


def _open_or_make(
    session: Session, data: Any, model: Any, parts: dict[str, Any], fingerprint: dict[str, Any], kinds: list[str]
) -> None:
    """Check the store that is there, or make an empty one."""
    config, folder = session.config, session.config.task.store
    if (Path(folder) / "about.json").exists():
        store = Store(folder)
        store.check_whole()
        if store.begun():
            store.check(fingerprint, kinds, folder)
            return
    first = next(iter(parts.values()))
    values = _of_batch(session, model, _first_batch(session, first), kinds)
    dtype = config.task.feature_dtype
    arrays = {
        name: ArraySpec(value.shape[1:], str(value.dtype) if name == "labels" else dtype)
        for name, value in values.items()
    }
    about = {
        "experiment": config.name,
        "data": data.name,
        "classes": list(data.classes),
        "ignore_index": data.ignore_index,
        "patch_size": int(model.backbone.patch_size),
        "weights": OmegaConf.to_container(config.record.weights) or {"source": config.init_from},
        "fingerprint": fingerprint,
    }
    Store.prepare(folder, about, arrays, {part: len(dataset) for part, dataset in parts.items()})


def _first_batch(session: Session, dataset: Any) -> Any:
    return next(iter(device_loader(dataset, [torch.arange(min(2, len(dataset)))], 0, session)))


def _fingerprint(session: Session, data: Any, model: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """What features depend on: ``weights``, ``preprocessing`` and ``data``."""
    config = session.config
    digest = hashlib.sha256()
    for name, value in sorted(model.backbone.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)}".encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    reading = {key: value for key, value in data.state().items() if key != "classes"}
    preprocessing = {
        **reading,
        "stretch": None if config.data.stretch is None else [*config.data.stretch, config.data.stretch_scope],
        "eval_pipeline": OmegaConf.to_container(config.data.eval_pipeline, resolve=True),
        "mean": [round(value, 3) for value in model.pixel_mean.flatten().tolist()],
        "std": [round(value, 3) for value in model.pixel_std.flatten().tolist()],
        "blocks": list(model.blocks),
        "precision": config.precision,
        "dtype": config.task.feature_dtype,
        "parts": list(parts),
    }
    return {
        "weights": {"sha256": digest.hexdigest()},
        "preprocessing": preprocessing,
        "data": {
            **{name: list(entry) for name, entry in (fingerprint_of(data) or {}).items()},
            **{f"the list of {part}": _in_order(dataset.samples) for part, dataset in parts.items()},
        },
    }


def _in_order(samples: Any) -> list[Any]:
    """Which image is at which place of the arrays, as an entry of a fingerprint; where the files lie plays no part."""
    digest = hashlib.sha256()
    for path, label in samples:
        said = "" if isinstance(label, str) else label
        digest.update(f"{Path(path).parent.name}/{Path(path).name}\0{said}\n".encode("utf-8", "surrogateescape"))
    return [len(samples), 0, digest.hexdigest()]


def _blocks(
    session: Session, data: Any, dataset: Any, model: Any, numbers: list[int], kinds: list[str]
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """The given blocks of a part; no more than one of them is in memory."""
    count, size = len(dataset), data.eval_batch_size
    batches = [
        (number, torch.arange(begin, min(begin + size, (number + 1) * BLOCK, count)))
        for number in numbers
        for begin in range(number * BLOCK, min((number + 1) * BLOCK, count), size)
    ]
    loader = device_loader(dataset, [indices for _, indices in batches], data.num_workers, session)
    held: list[dict[str, np.ndarray]] = []
    for place, ((number, _), batch) in enumerate(zip(batches, loader)):
        held.append(_of_batch(session, model, batch, kinds))
        if place + 1 == len(batches) or batches[place + 1][0] != number:
            yield number, {name: np.concatenate([values[name] for values in held]) for name in held[0]}
            held = []


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
    cls, mean, patches = [], [], []
    for features in found:
        cls.append(features.cls.float())
        mean.append(features.patches.float().mean(dim=(1, 2)))
        patches.append(features.patches)
    values = {"cls": torch.cat(cls, dim=-1), "mean": torch.cat(mean, dim=-1)}
    if "patches" in kinds:
        values["patches"] = torch.cat(patches, dim=-1).float()
    held = {name: value.cpu().numpy() for name, value in values.items()}
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
