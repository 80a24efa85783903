from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from exp.config.ranges import check_ranges
from exp.config.schema import ExpConfig, LauncherConfig
from exp.errors import ConfigError


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
