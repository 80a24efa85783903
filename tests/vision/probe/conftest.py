from __future__ import annotations

import numpy as np
import pytest

from exp.vision.probe.store import BLOCK, ArraySpec, Store

CLASSES = ["a", "b", "c", "d"]


def make_store(folder, counts, dim=12, labels=None, spread=1.6, seed=0):
    """Features of classes that overlap: kept as task=features does it."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(len(CLASSES), 2 * dim))
    arrays = {"cls": ArraySpec((dim,), "float32"), "mean": ArraySpec((dim,), "float32")}
    arrays["labels"] = ArraySpec((), "int64") if labels is None else ArraySpec((len(CLASSES),), "uint8")
    fingerprint = {"weights": {"sha256": "1" * 64}, "preprocessing": {"size": 32}, "data": {"x": [1, 2, "3"]}}
    about = {"experiment": "made_up", "data": "made up", "classes": CLASSES, "ignore_index": -1, "patch_size": 8,
             "weights": {"source": "w.pth"}, "fingerprint": fingerprint}  # fmt: skip
    Store.prepare(folder, about, arrays, counts)
    store = Store(folder)
    for part, count in counts.items():
        kinds = generator.integers(0, len(CLASSES), count)
        rows = centres[kinds] + spread * generator.normal(size=(count, 2 * dim))
        told = kinds if labels is None else (rows[:, : len(CLASSES)] > 0.8).astype(np.uint8)
        for number in store.missing(part):
            where = slice(number * BLOCK, (number + 1) * BLOCK)
            values = {"cls": rows[where, :dim], "mean": rows[where, dim:], "labels": told[where]}
            store.write_block(part, number, values)
    return store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("probe") / "store", {"train": 700, "val": 200, "test": 300})
