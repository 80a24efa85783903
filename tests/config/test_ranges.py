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
    ("key", "value"),
    [
        ("optim.clip_grad_norm", -1.0),  # would climb
        ("optim.clip_grad_norm", 0.0),
        ("min_delta", float("nan")),
        ("schedule.warmup_steps", -1),
        ("sweep.parallel_jobs", 0),
        ("launcher.max_restarts", -1),
    ],
)
def test_a_number_that_means_nothing_is_refused(key, value):
    with pytest.raises(ConfigError, match=f"^{key}={value}"):
        check_ranges(config(**{key: value}))
