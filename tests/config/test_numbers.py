"""Numbers of a configuration: what follows from others, and what means nothing."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from exp.config.check import check_ranges, derive_batch_sizes
from exp.config.schema import ExpConfig, LauncherConfig
from exp.errors import ConfigError


def test_the_batch_size_that_is_not_given_is_derived_or_what_would_be_valid_is_named():
    for given, derived in {
        (16, None, 1, 1): (16, 16), (16, None, 2, 8): (16, 256), (None, 64, 4, 2): (8, 64), (8, 64, 4, 2): (8, 64),
    }.items():  # fmt: skip
        assert derive_batch_sizes(*given) == derived
    for given, valid in {
        (None, None, 1, 1): "batch_size", (None, 65, 1, 2): "64 or 66", (None, 3, 2, 2): "4", (16, 64, 1, 2): "32",
        (0, None, 1, 1): "batch_size=0",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=valid):
            derive_batch_sizes(*given)


def test_numbers_that_mean_nothing_are_refused():
    made = OmegaConf.structured(ExpConfig)
    made.launcher = OmegaConf.structured(LauncherConfig)
    check_ranges(made)  # the defaults
    for key, value in (
        ("optim.clip_grad_norm", -1.0), ("optim.clip_grad_norm", 0.0), ("min_delta", float("nan")),
        ("schedule.warmup_steps", -1), ("sweep.parallel_jobs", 0), ("launcher.max_restarts", -1),
    ):  # fmt: skip
        wrong = made.copy()
        OmegaConf.update(wrong, key, value)
        with pytest.raises(ConfigError, match=f"^{key}={value}"):
            check_ranges(wrong)
    made.launcher = {"_target_": "mine.Launcher"}  # without keys of ours
    check_ranges(made)
