from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module

from exp.config import choices, structures
from exp.config.explain import explain


def told(known, *arguments):
    structures.register()
    choices.register_resolvers()
    with initialize_config_module("exp.conf", version_base="1.3"), pytest.raises(Exception) as error:
        compose("config", list(arguments))
    return explain(error.value, known).splitlines()[0]


def test_a_key_that_another_choice_has():
    """As in a sweep over models, one of which has the key."""
    line = told(["model.d_model"], "model=dinov3_scenes", "model.d_model=16")
    assert line.startswith(
        "there is no key 'model.d_model': the model that is chosen has none of this name; leave it out"
    )


def test_a_value_where_a_list_is_expected():
    assert told([], "data.covariates=c") == "data.covariates=c: a list is expected: 'data.covariates=[c]'"
