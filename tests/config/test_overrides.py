"""Dictionaries and lists of the schema, set on the command line as a user sets them."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Union, get_type_hints

import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import MISSING, OmegaConf

from exp.config import choices, schema, structures
from exp.config.dictionaries import replace_given
from exp.config.slurm import SubmititConfig
from exp.vision.config import SegmentationDataConfig
from exp.vision.model_config import SegmenterConfig

SEGMENTATION = ["experiment=dinov3_dubai", "data=segmentation", "data.name=mine", "data.root=."]


def composed(exp, *arguments):
    done = exp(*arguments, "--cfg", "job")
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def value_of(hint):
    """A value of that type that is no default, and how it is written on the command line."""
    origin, arguments = getattr(hint, "__origin__", None), getattr(hint, "__args__", ())
    if origin is Union:
        return value_of(arguments[0])
    if origin in (dict, Dict):
        key = {str: "some", int: 3}[arguments[0]]
        inner, written = value_of(arguments[1])
        return {key: inner}, f"{{{key}: {written}}}"
    if origin in (list, List):
        inner, written = value_of(arguments[0])
        return [inner, inner], f"[{written},{written}]"
    return {str: ("6E1234", '"6E1234"'), int: (7, "7"), float: (0.5, "0.5"), Any: ("any", "any")}[hint]


def collections(node, prefix):
    """The keys of a dataclass that are dictionaries or lists, or may be."""
    for field in dataclasses.fields(node):
        hint = get_type_hints(node)[field.name]
        inner = hint.__args__[0] if getattr(hint, "__origin__", None) is Union else hint
        if getattr(inner, "__origin__", None) in (dict, list, Dict, List):
            yield f"{prefix}{field.name}", hint
        elif dataclasses.is_dataclass(inner):
            yield from collections(inner, f"{prefix}{field.name}.")


@pytest.mark.parametrize(
    ("chosen", "parts"),
    [
        (["launcher=submitit"], {"launcher": SubmititConfig}),
        (["experiment=dinov3_dubai"], {"model": SegmenterConfig, "data": SegmentationDataConfig}),
        (SEGMENTATION, {"data": SegmentationDataConfig}),
    ],
)  # fmt: skip
def test_every_dictionary_and_list_of_the_schema_takes_what_is_given(exp, chosen, parts):
    keys = dict(collections(schema.ExpConfig, ""))
    for prefix, node in parts.items():
        keys.update(collections(node, f"{prefix}."))
    assert len(keys) >= 8
    values = {key: value_of(hint) for key, hint in keys.items()}
    found = composed(exp, *chosen, *(f"{key}={written}" for key, (_, written) in values.items()))
    for key, (value, _) in values.items():
        there = OmegaConf.select(OmegaConf.create(found), key)
        assert there.items() >= value.items() if isinstance(value, dict) else there == value, key
    assert MISSING not in found.values()


def test_a_dictionary_replaces_that_of_the_experiment_and_members_are_set_one_by_one():
    structures.register()
    choices.register_resolvers()

    def data(*overrides):
        with initialize_config_module("exp.conf", version_base="1.3"):
            config = compose("config", list(overrides))
        replace_given(config, overrides)
        return OmegaConf.to_container(config, resolve=True)["data"]

    own = data("experiment=dinov3_dubai")["palette"]
    given = "data.palette={my roof: 112233, road: AABBCC}"
    assert data("experiment=dinov3_dubai", given)["palette"] == {"my roof": "112233", "road": "AABBCC"}
    assert data("experiment=dinov3_dubai", "data.palette.road=AAAAAA")["palette"] == {**own, "road": "AAAAAA"}
    assert data("experiment=dinov3_dubai", "data.palette.pond=AAAAAA")["palette"] == {**own, "pond": "AAAAAA"}
    assert data("experiment=dinov3_dubai", "data.palette=null")["palette"] is None
    found = data(*SEGMENTATION, "data.mask_values={1: 0, 255: 1}", "data.palette.a=AAAAAA")
    assert found["mask_values"] == {1: 0, 255: 1}
    assert found["palette"] == {"a": "AAAAAA"}
