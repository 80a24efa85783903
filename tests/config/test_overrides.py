"""Dictionaries and lists of the schema, set on the command line as a user sets them."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Union, get_type_hints

import cv2
import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import MISSING, OmegaConf

from exp.config import choices, schema, structures
from exp.config.dictionaries import replace_given
from exp.config.slurm import SubmititConfig
from exp.vision.config import SceneDataConfig, SegmentationDataConfig
from exp.vision.model_config import SceneClassifierConfig, SegmenterConfig

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "parts"),
    [
        (["launcher=submitit"], {"launcher": SubmititConfig}),
        (["experiment=dinov3_eurosat"], {"model": SceneClassifierConfig, "data": SceneDataConfig}),
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["experiment=dinov3_dubai", "data.palette=road:AAAAAA"], ["data.palette=road:AAAAAA"]),
        (["launcher={nnodes: 2, foo: 3}"], ["there is no key 'launcher.foo'"]),
        ([*SEGMENTATION, "data.palette={road: 6E1234}"], ["road", "'inf'", "'data.palette={road: \"6E1234\"}'"]),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_line(exp, arguments, words):
    (exp.folder / "images").mkdir()
    done = exp(*arguments, "backend=cpu")
    first = done.stderr.splitlines()[0]
    assert done.returncode == 2
    assert first.startswith("error: ")
    assert all(word in first for word in words), first
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_documented_ways_to_use_ones_own_masks_train(exp):
    """Masks of colours, then of class numbers with other values, in parts by patterns."""
    for kind, count in (("images", 3), ("colours", 3), ("numbers", 1)):
        (exp.folder / "city" / kind).mkdir(parents=True)
        for number in range(6):
            pixels = np.random.default_rng(number).integers(0, 2, (64, 64, 1), dtype=np.uint8)
            # BGR: 6E1234 and 000000
            colours = np.where(pixels == 1, (0x34, 0x12, 0x6E), (0, 0, 0)).astype(np.uint8)
            cv2.imwrite(str(exp.folder / "city" / kind / f"{number}.png"), colours if count == 3 else pixels * 200)
    small = ["backend=cpu", "model.embed_dim=16", "model.depth=1", "model.num_heads=2", "model.head_channels=16",
             "model.window=64", "data.size=32", "data.num_workers=0", "global_batch_size=2", "max_epochs=null",
             "max_steps=2", "val_every=2", "plots=false"]  # fmt: skip
    masks = {
        "colours": ['data.palette={road: "6E1234", roof: "000000"}'],
        "numbers": ["data.classes=[roof,road]", "data.mask_values={0: 0, 200: 1}"],
    }
    for kind, settings in masks.items():
        own = ["data=segmentation", "data.name=city", "data.root=city", f"data.masks={kind}", f"output_dir={kind}"]
        parts = "data.parts={train: ['*/[0-3].*'], val: ['*/[45].*']}"
        done = exp("experiment=dinov3_dubai", *own, parts, *settings, *small)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert exp.result(kind)["data"] == {"train": 4, "val": 2, "tested_on": "val"}
        record = yaml.safe_load((exp.folder / kind / "config.yaml").read_text())["data"]
        assert list(record["palette"] or record["classes"]) == (
            ["road", "roof"] if kind == "colours" else ["roof", "road"]
        )
