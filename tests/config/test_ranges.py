from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from exp.config.ranges import check_ranges
from exp.config.schema import ExpConfig, LauncherConfig
from exp.errors import ConfigError


def config(**settings):
    made = OmegaConf.structured(ExpConfig)
    made.launcher = OmegaConf.structured(LauncherConfig)
    for key, value in settings.items():
        OmegaConf.update(made, key, value)
    return made


def test_defaults_are_within_their_ranges():
    check_ranges(config())
    made = config()
    made.launcher = {"_target_": "mine.Launcher"}  # without keys of ours
    check_ranges(made)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("optim.clip_grad_norm", -1.0, "-1.0 must be above 0, or null for no clipping"),  # would climb
        ("optim.clip_grad_norm", 0.0, "0.0 must be above 0"),
        ("min_delta", float("nan"), "nan must be at least 0"),
        ("schedule.warmup_steps", -1, "-1 must be at least 0"),
        ("checkpoint.keep_last", 0, "0 must be at least 1"),
        ("min_delta", -1.0, "-1.0 must be at least 0"),
        ("sweep.parallel_jobs", 0, "0 must be at least 1, or null"),
        ("launcher.max_restarts", -1, "-1 must be at least 0"),
        ("debug.val_batches", 0, "0 must be at least 1, or null"),
    ],
)
def test_a_number_that_means_nothing_is_refused(key, value, said):
    with pytest.raises(ConfigError, match=f"^{key}={said}"):
        check_ranges(config(**{key: value}))
