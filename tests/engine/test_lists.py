"""Lists of what exp refuses: written down here, and compared with every key of the source."""

from __future__ import annotations

import re

import pytest
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.compose import typed
from exp.config.diff import resume_changes
from exp.config.resolve import class_names, to_plain
from exp.config.schema import LauncherConfig
from exp.config.sources import group_keys
from exp.engine.build import build_data, build_evaluator, build_model
from exp.engine.mmengine import build_hooks
from exp.engine.optim import build_optimizer
from exp.engine.schedules import build_schedulers
from exp.engine.wrapper import place_and_wrap
from exp.errors import ConfigError
from exp.hardware.registry import create_backend
from exp.launcher.base import launcher_class
from exp.task import task_class
from exp.trackers.base import start
from tests.config.conftest import composed
from tests.engine.test_by_hand import SETTINGS, Noisy, Points

SECTIONS = {
    "backend", "checkpoint", "data", "debug", "figures", "launcher", "logger", "model", "optim", "record", "reference",
    "schedule", "sweep", "task", "wrapper",
}  # fmt: skip
# Of a training that is continued. All of `model` and `data`, but for these, must stay as it was.
MAY_CHANGE = {
    "data.allow_gaps", "data.archive_folder", "data.cache_mb", "data.eval_batch_size",
    "data.num_workers", "data.device_cache", "data.on_error", "data.root", "data.sample_data",
    "model.backbone.activation_checkpointing",
}  # fmt: skip
STAYS = {
    "debug.overfit", "debug.train_batches", "global_batch_size", "init_from", "metric", "optim.options.amsgrad",
    "optim.options.centered", "optim.type", "seed", "task.name",
}  # fmt: skip
# What is no part of a training, or follows from other keys.
SILENT = {
    "batch_size", "checkpoint.trusted", "init_partial", "output_dir", "overwrite",
    "reference.data", "reference.metrics", "reference.source", "resume", "resume_changed_data",
}  # fmt: skip
TAKES_EFFECT = {
    "accumulate", "backend.*", "checkpoint.*", "compile", "debug.eval_batches", "debug.replay_every",
    "dropout_by_sample",
    "figures.*", "hooks", "launcher.*", "log_every", "logger.*", "max_epochs", "max_steps", "metrics",
    "min_delta", "name", "nproc", "optim.*", "patience", "plots", "plugins", "precision", "sanity_check",
    "report_placement", "schedule.*", "val_every", "wrapper.*",
}  # fmt: skip


def leaves(node, prefix=""):
    """Every dotted key; an empty dictionary has the member ``x``."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value or {"x": None}, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def fate(key):
    """What becomes of a changed key when a training is continued."""
    old, new = (OmegaConf.create() for _ in range(2))
    for config, value in ((old, "was"), (new, "is")):
        OmegaConf.update(config, key, value)
    found = resume_changes(to_plain(old), to_plain(new))
    return "stays" if found.refused else "takes effect" if found.allowed else "silent"


def test_every_key_stays_takes_effect_or_is_silent_when_a_training_is_continued():
    """A key that is new in the schema belongs into one of the lists."""
    config = to_plain(typed(composed()))
    own = {key: value for key, value in config.items() if key not in ("data", "model", "task", "reference")}
    every = {*leaves(own), *group_keys(), *STAYS, *SILENT}
    found: dict = {"stays": set(), "silent": set(), "takes effect": set()}
    for key in every:
        found[fate(key)].add(key)
    of_group = {key for key in every if key.startswith(("model.", "data."))}
    assert found["stays"] == (of_group - MAY_CHANGE) | STAYS
    sections = ("record.", "sweep.", "task.")
    assert {key for key in found["silent"] if not key.startswith(sections)} == SILENT
    others = {key for key in found["takes effect"] if key not in MAY_CHANGE}
    whole = [key[:-1] for key in TAKES_EFFECT if key.endswith("*")]
    assert {key for key in others if not key.startswith(tuple(whole))} == {k for k in TAKES_EFFECT if k[-1] != "*"}
    assert not {key for key in others if key.startswith(sections)}


def test_every_section_refuses_a_key_that_it_does_not_have():
    config = composed()
    assert sorted(key for key in config if isinstance(config[key], DictConfig)) == sorted(SECTIONS)
    named = {group: {"_target_": config[group]["_target_"]} for group in ("launcher", "task", "model", "data")}
    for section in SECTIONS:
        with pytest.raises(OmegaConfBaseException, match="nonsense"):
            typed(OmegaConf.create({**named, section: {**named.get(section, {}), "nonsense": 1}}))


def test_every_key_that_names_a_class_refuses_one_of_another_interface(make_session, make_runner):
    wrong, of_torch, points = "exp.backends.cpu.CpuBackend", "torch.nn.Identity", Points()
    session = make_session(0, 2, **{**SETTINGS, **{part: {"_target_": wrong} for part in ("data", "model")}})
    config = session.config
    config.task, config.metrics = {"_target_": wrong}, [{"_target_": wrong}]
    config.launcher = LauncherConfig(_target_=wrong)
    config.wrapper._target_ = config.optim.type = wrong
    config.logger.trackers = {"mine": {"_target_": wrong}}

    calls = {
        "backend._target_": lambda: create_backend({"_target_": of_torch, "name": "mine"}),
        "launcher._target_": lambda: launcher_class(config),
        "task._target_": lambda: task_class(config),
        "wrapper._target_": lambda: place_and_wrap(Noisy(), session),
        "model._target_": lambda: build_model(session, points),
        "data._target_": lambda: build_data(session),
        "metrics[0]._target_": lambda: build_evaluator(session, points),
        "logger.trackers.mine._target_": lambda: start(config.logger, session.folder, print),
        "hooks[0].type": lambda: build_hooks([{"type": wrong}], "mse", False),
        "optim.type": lambda: build_optimizer(Noisy(), config.optim),
        "schedule.param_scheduler.type": lambda: build_schedulers([{"type": wrong}], make_runner()),
    }
    in_use = {key.replace("scheduler[0]", "scheduler").replace("tensorboard", "mine")
              for key, _ in class_names(composed("wrapper=fsdp", "logger=tensorboard"))}  # fmt: skip
    assert in_use <= {*calls}
    for key, call in calls.items():
        with pytest.raises(ConfigError, match=f"^{re.escape(key)}=.* is not a subclass of "):
            call()
