"""Numbers of a configuration that follow from others."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from exp.config.check import check_values, derive_batch_sizes
from exp.config.compose import typed
from exp.config.shares import split_batch
from exp.errors import ConfigError


def derived(batch_size, global_batch_size, accumulate, nproc):
    keys = {"batch_size": batch_size, "global_batch_size": global_batch_size, "accumulate": accumulate, "nproc": nproc}
    config = SimpleNamespace(
        launcher=SimpleNamespace(nnodes=1, min_nnodes=None, share=None, shares=[], mixed=False), **keys
    )
    derive_batch_sizes(config)
    return config.batch_size, config.global_batch_size


def test_the_batch_size_that_is_not_given_is_derived_or_what_would_be_valid_is_named():
    for given, found in {
        (16, None, 1, 1): (16, 16), (16, None, 2, 8): (16, 256), (None, 64, 4, 2): (8, 64), (8, 64, 4, 2): (8, 64),
    }.items():  # fmt: skip
        assert derived(*given) == found
    for given, valid in {
        (None, None, 1, 1): "batch_size", (None, 65, 1, 2): "64 or 66", (None, 3, 2, 2): "4", (16, 64, 1, 2): "32",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=valid):
            derived(*given)


def test_parts_have_the_ratio_of_shares_and_none_is_empty():
    for size, shares, parts in (
        (32, [3, 1], [24, 8]), (8, [1, 1, 1], [3, 2, 3]), (7, [1.0, 0.5], [5, 2]), (4, [1, 1000, 1], [1, 2, 1]),
        (3, [9, 1, 1], [1, 1, 1]), (24, [1] * 8, [3] * 8),
    ):  # fmt: skip
        assert split_batch(size, shares) == parts


LEAST = {
    "nproc": 1, "accumulate": 1, "log_every": 1, "checkpoint.keep_last": 1, "launcher.nnodes": 1, "batch_size": 1,
    "launcher.min_nnodes": 1,
    "global_batch_size": 1, "max_epochs": 1, "max_steps": 1, "val_every": 1, "patience": 1, "debug.train_batches": 1,
    "debug.eval_batches": 1, "debug.replay_every": 1, "sweep.parallel_jobs": 1, "checkpoint.every_epochs": 0,
    "checkpoint.every_steps": 0, "launcher.max_restarts": 0, "optim.lr": 0.0, "optim.weight_decay": 0.0,
}  # fmt: skip


def test_numbers_have_bounds():
    for key, least in LEAST.items():
        for value in (least, least - 1):
            config = typed(OmegaConf.create({"launcher": {"_target_": "auto"}, "wrapper": {"kind": "ddp"}}))
            OmegaConf.update(config, key, value)
            with pytest.raises(ConfigError, match=f"^{key}={value} must") if value < least else nullcontext():
                check_values(config)
