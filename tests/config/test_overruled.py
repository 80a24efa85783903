from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module

from exp.config.differences import overruled
from tests.config.conftest import composed


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [(["data=illness", "seed=2"], ["experiment=timebridge_small sets data.lookback=336 (data=illness: 36)"]),
     (["data=illness", "data.lookback=36"], []), (["model=timebridge_small", "optim=adam"], []),
     (["data=etth1", "experiment=timebridge_etth1"], [])],  # the same there
)  # fmt: skip
def test_what_an_experiment_changes_of_a_choice_is_told(overrides, lines):
    config = composed("backend=cpu", *overrides)
    experiment = next((each.partition("=")[2] for each in overrides if "experiment=" in each), "timebridge_small")
    with initialize_config_module("exp.conf", version_base="1.3"):
        assert overruled(config, overrides, compose, experiment) == lines
        assert overruled(config, overrides, compose, None) == []
