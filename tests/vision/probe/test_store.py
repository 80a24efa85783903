"""The arrays of a store."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exp.errors import ConfigError, RunError
from exp.vision.narrowing import narrowed
from exp.vision.probe.linear import Scale, fit_logistic
from exp.vision.probe.rows import patch_labels, rows_of
from exp.vision.probe.scoring import of_pixels
from exp.vision.probe.store import ArraySpec, Store
from tests.vision.probe.conftest import make_store


def test_patches_and_pixels(tmp_path):
    """Patches of two kinds, in masks with a border that does not count and one that is no whole patch."""
    patch, generator = 4, np.random.default_rng(1)
    arrays = {"cls": ArraySpec((2,), "float32"), "mean": ArraySpec((2,), "float32"),
              "patches": ArraySpec((3, 3, 2), "float16"), "labels": ArraySpec((10, 12), "uint8")}  # fmt: skip
    kinds = {part: generator.integers(0, 2, (20, 3, 3)) for part in ("train", "val")}
    about = {"experiment": "x", "classes": ["a", "b"], "patch_size": patch, "fingerprint": {}, "weights": {}}
    Store.prepare(tmp_path, about, arrays, dict.fromkeys(kinds, 20))
    store = Store(tmp_path)
    for part, classes in kinds.items():
        mask = classes.repeat(patch, 1).repeat(patch, 2)[:, :10].astype(np.uint8)
        mask[:, :, 0] = 255
        mask[0, :4, :4] = 255
        features = np.stack([classes * 2.0 - 1, generator.normal(size=classes.shape)], axis=-1)
        empty = np.zeros((20, 2))
        store.write_block(part, 0, {"cls": empty, "mean": empty, "patches": features, "labels": mask})
    labels = patch_labels(store, "train", 2)
    assert labels[0] == -1
    assert (labels[1:] == kinds["train"].reshape(-1)[1:]).all()
    rows = rows_of(store, "train", "patches", torch.device("cpu"), 0, 2, images=np.arange(1, 20))
    assert len(rows) == 19 * 9
    scale = Scale(rows)
    weights, _ = fit_logistic(rows, scale, 2, 10.0, 100)
    found = of_pixels(store, "val", np.arange(20), scale, [weights, -weights], torch.device("cpu"))
    assert found[0]["mIoU"] > 0.75
    assert found[1]["mIoU"] < 0.25


def test_a_damaged_store_is_named_and_refused(tmp_path):
    store = make_store(tmp_path / "store", {"train": 10, "val": 4})
    rows = rows_of(store, "train", "cls", torch.device("cpu"), 0, 4)
    rows.check_finite("x")
    store.write_block("train", 0, {"cls": np.where(np.arange(10)[:, None] == 7, np.nan, np.zeros((10, 12)))})
    with pytest.raises(ConfigError, match=r"x: .* row 7"):
        rows.check_finite("x")
    path = tmp_path / "store" / "val_mean.npy"
    whole = path.read_bytes()
    for spoil in (lambda: path.write_bytes(whole[:-5]), lambda: path.write_bytes(b""), path.unlink,
                  lambda: np.save(str(path), np.zeros((3, 12), np.float32))):  # fmt: skip
        Store(tmp_path / "store").check_complete()
        spoil()
        with pytest.raises(ConfigError, match=r"val_mean\.npy"):
            Store(tmp_path / "store").check_complete()
        path.write_bytes(whole)
    (tmp_path / "store" / "about.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"about\.json"):
        Store(tmp_path / "store")


def test_features_that_do_not_fit_their_type_are_refused():
    for value, dtype, named in ((np.nan, "float32", "cls"), (1e6, "float16", r"task\.feature_dtype")):
        with pytest.raises(RunError, match=named):
            narrowed("cls", np.array([value], np.float32), dtype)
    assert narrowed("cls", np.array([1.0], np.float32), "float16").dtype == np.float16
