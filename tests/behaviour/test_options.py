"""Dictionaries of options: every name is one that its receiver takes, or is refused before the run begins."""

from __future__ import annotations

import dataclasses
import inspect
import typing

from exp.config import schema
from exp.launcher.slurm.keys import SubmititConfig
from exp.plugins import installed
from tests.behaviour.conftest import TINY, one_by_one

WRONG = {
    "backend.options": (["+backend.options.nonsense=1"], "backend.options.nonsense"),
    "wrapper.options": (["+wrapper.options.gradient_as_bucket_vew=true"], "gradient_as_bucket_view'"),
    "optim.options": (["optim.type=Adam", "+optim.options.bets=[0.9,0.99]"], "betas'"),
    "schedule.param_scheduler": (
        ["schedule.param_scheduler=[{type:CosineAnnealingLR,begin:5000,T_mex:3}]"],
        "schedule.param_scheduler[0].T_mex",
    ),
    "logger.trackers": (["logger=tensorboard", "+logger.trackers.tensorboard.foldr=x"], "tensorboard.foldr"),
    "hooks": (["hooks=[{type:EMAHook,momentun:0.1}]"], "momentum'"),
    "metrics": (["metrics=[{_target_:exp.forecasting.metrics.ForecastMetrics,nonsense:1}]"], "metrics[0].nonsense"),
}
FURTHER = [
    (["+wrapper.options.device_ids=[0]", "wrapper=ddp"], "wrapper.options.device_ids"),
    (["+wrapper.options.process_group=x"], "wrapper.options.process_group"),
    (["+wrapper.options.bucket_cap_mb=5"], "wrapper.bucket_cap_mb"),
    (["+wrapper.options.nonsense=1", "nproc=2"], "wrapper.options.nonsense"),
    (["+wrapper.options.static_graph=1", "wrapper=none"], "static_graph"),
    (["+wrapper.options.precison=fp32", "wrapper=fsdp"], "precision'"),
    (["wrapper=fsdp", "wrapper.bucket_cap_mb=5"], "wrapper.bucket_cap_mb"),
    (["+optim.options.lr=3"], "optim.lr"),
    (["schedule.param_scheduler=[{type:CosineAnnealingLR,epoch_length:3}]"], "param_scheduler[0].epoch_length"),
    (["hooks=[{type:EarlyStoppingHook,patiense:3}]"], "patience'"),
]
NO_OPTIONS = {
    "launcher", "task", "model", "data",  # typed, or a user's class; tests/behaviour/test_refusals.py
    "backend.env", "launcher.extra",  # variables and options of other programs
    "reference.metrics", "record.chosen", "record.follows", "record.reference", "record.weights",
}  # fmt: skip
OF_FAMILIES = {  # names in these are those of columns, classes, modalities; objects are checked as any ``_target_``
    "derived_columns", "device_cache", "channels", "layout", "mean", "std", "modality_statistics", "sources",
    "value_range", "splits", "palette", "label_map", "freeze", "head",
}  # fmt: skip


def open_fields(cls: type) -> set[str]:
    """Names of a dataclass's fields whose keys or types the schema leaves open."""
    hints = {name: str(hint) for name, hint in typing.get_type_hints(cls).items()}
    return {
        field.name for field in dataclasses.fields(cls) if "Dict" in hints[field.name] or "Any" in hints[field.name]
    }


def test_the_table_has_every_dictionary_of_options():
    sections = {"": schema.ExpConfig}
    hints = typing.get_type_hints(schema.ExpConfig)
    sections.update({f"{name}.": hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)})
    sections["launcher."] = SubmititConfig
    found = {f"{section}{name}" for section, cls in sections.items() for name in open_fields(cls)}
    assert found == {*WRONG, *NO_OPTIONS}
    keys = [keys for plugin in installed().values() for keys in plugin.keys.values() if inspect.isclass(keys)]
    assert keys
    assert {name for cls in keys for name in open_fields(cls)} <= OF_FAMILIES


def test_a_name_that_is_no_option_or_that_exp_sets_is_refused_with_the_nearest_or_the_reason(exp):
    rows = [*WRONG.values(), *FURTHER]
    lines = [[*TINY, *words, "output_dir=run"] for words, _ in rows]
    for (words, named), (code, said, _) in zip(rows, one_by_one(exp.folder, lines)):
        assert (code, named in said.splitlines()[0], "Traceback" in said) == (2, True, False), (words, said)
    assert list(exp.folder.iterdir()) == []
