"""Dictionaries and lists of the schema, set on the command line as a user sets them."""

from __future__ import annotations

import dataclasses

import pytest
import yaml
from omegaconf import OmegaConf

from exp.config.compose import replace_dict_overrides, typed
from exp.config.resolve import trust_packages
from exp.config.schema import ExpConfig
from exp.errors import ConfigError
from tests.config.conftest import composed

SEGMENTATION = ["experiment=dinov3_dubai", "data=segmentation", "data.name=mine", "data.root=."]
EVERYWHERE = [
    'backend.env={a: "6E1234"}', "backend.options={a: b}", "wrapper.options={a: b}", "optim.options={a: b}",
    "schedule.param_scheduler=[{a: b}]", "logger.trackers={a: b}",
    'logger.requires=["6E1234"]', "reference.metrics={3: {a: 0.5}}", "metrics=[a,b]", "hooks=[{a: b}]", "plugins=[a,b]",
]  # fmt: skip
SUBMITTED = ["launcher.setup=[a,b]", "launcher.extra={a: b}", "launcher.srun_args=[a,b]"]
IMAGES = [
    "model.backbone.out_indices=[7,7]", "model.lora.targets=[a]", "model.class_weights=[0.5]",
    "model.tta_scales=[0.5,0.5]", "data.bands=[a,7]",
    "data.sources=[{root: a, weight: 0.5}]",
    "data.modality_statistics={a: b}", "data.split_ratio=[0.5]", "data.classes=[a]",
    "data.train_pipeline=[a]", "data.eval_pipeline=[a]", "data.datasets=[a]", "data.splits={a: [b,c]}",
    'data.palette={a: "6E1234"}', 'data.ignore_colors=["6E1234"]', "data.label_map={3: 7}", "data.ignore_values=[7]",
]  # fmt: skip


def given(*overrides):
    config = composed(*overrides)
    replace_dict_overrides(config, overrides)
    return config


@pytest.mark.parametrize(
    ("chosen", "overrides"), [(["launcher=submitit"], [*EVERYWHERE, *SUBMITTED]), (SEGMENTATION, IMAGES)]
)
def test_every_dictionary_and_list_of_the_schema_takes_what_is_given(chosen, overrides):
    found = given(*chosen, *overrides)
    for key, _, text in (override.partition("=") for override in overrides):
        value, there = yaml.safe_load(text), OmegaConf.select(found, key)
        assert there.items() >= value.items() if isinstance(value, dict) else there == value, key


def test_a_dictionary_replaces_that_of_the_experiment_and_members_are_set_one_by_one():
    def palette(*overrides):
        return given("experiment=dinov3_dubai", *overrides).data.palette

    own = palette()
    assert palette("data.palette={my roof: 112233, road: AABBCC}") == {"my roof": "112233", "road": "AABBCC"}
    assert palette("data.palette.road=AAAAAA") == {**own, "road": "AAAAAA"}
    assert palette("data.palette.pond=AAAAAA") == {**own, "pond": "AAAAAA"}
    assert palette("data.palette=null") is None
    found = given(*SEGMENTATION, "data.label_map={1: 0, 255: 1}", "data.palette.a=AAAAAA").data
    assert (found.label_map, found.palette) == ({1: 0, 255: 1}, {"a": "AAAAAA"})


IN_A_FILE = {
    "backend": {"allow_fallback": True}, "launcher": {"max_restarts": 2}, "wrapper": {"bucket_cap_mb": 7},
    "task": {"name": "mine"}, "model": {"d_model": 8}, "data": {"lookback": 48}, "optim": {"lr": 0.5},
    "schedule": {"warmup_steps": 3}, "logger": {"patience_s": 5.0}, "checkpoint": {"keep_last": 5},
    "sweep": {"plots": False}, "debug": {"eval_batches": 2}, "figures": {"dpi": 50}, "name": "mine",
    "reference": {"metrics": {96: {"mse": 0.5}}, "data": "mine", "source": "mine"},
    "nproc": 3, "seed": 7,
    "dropout_by_sample": True, "precision": "bf16", "compile": True, "batch_size": 5, "global_batch_size": 15,
    "accumulate": 2, "max_epochs": 3, "max_steps": 9, "val_every": 4, "patience": 6, "metric": "mae",
    "metrics": [{"_target_": "mine.Metric"}], "min_delta": 0.25, "resume": "auto", "resume_changed_data": True,
    "init_from": "w.pth", "init_partial": True, "output_dir": "mine", "overwrite": True, "log_every": 3,
    "sanity_check": False, "plots": False, "report_placement": True, "hooks": [{"type": "Mine"}],
}  # fmt: skip
REFUSED = {"plugins": ["mine"], "record": {"trained_in": "mine"}}
"""A stranger could have written the file; exp writes the record itself."""


def test_an_experiment_sets_every_key_of_the_root(tmp_path):
    assert {*IN_A_FILE, *REFUSED} == {field.name for field in dataclasses.fields(ExpConfig)}
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\n" + yaml.safe_dump(IN_A_FILE))
    found = typed(composed("experiment=mine", folders=[str(tmp_path)]))
    for key, value in IN_A_FILE.items():
        there = OmegaConf.to_container(found)[key]
        assert there.items() >= value.items() if isinstance(value, dict) else there == value, key
    for key, value in REFUSED.items():
        file.write_text("# @package _global_\n" + yaml.safe_dump({key: value}))
        with pytest.raises(ConfigError, match=key):
            trust_packages(composed("experiment=mine", folders=[str(tmp_path)]).plugins, overrides=[])
