"""What a configuration may name: each key a class of its interface, in a package that the user has chosen."""

from __future__ import annotations

import sys

import pytest
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS
from omegaconf import OmegaConf
from torch import nn

from exp.config.check import check_hooks
from exp.config.resolve import check_names, check_path_part, check_target, check_type, create, resolve, trust_packages
from exp.engine.mmengine import lookup_class
from exp.errors import ConfigError, UnavailableError

# A module that tells when it is imported, and what it is asked to do.
MINE = """
import builtins, torch
from os import system
builtins.executed.append("import")
class Part(torch.nn.Module):
    def __init__(self, *args, **keys):
        super().__init__()
        builtins.executed.append(keys)
"""


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """What ``mine.py``, in the current folder, has executed."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    done: list = []
    monkeypatch.setattr("builtins.executed", done, raising=False)
    yield done
    sys.modules.pop("mine", None)
    trust_packages([])


def test_nothing_but_a_class_of_the_interface_is_called(executed):
    for target in (
        "exp.cli.os.system", "exp.forecasting.timebridge.model.TimeBridge.__init__.__globals__", "torch.nn", "Linear",
        "exp.backends.cpu.CpuBackend", "torch.nn.Linear\n", "mine.system", "nonesuch.Part",
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"model\._target_"):
            create({"_target_": target, "command": "touch x", "config": {}}, nn.Module, "model")
    assert executed == ["import"]


def test_arguments_are_those_of_the_configuration_and_parts_are_modules(executed):
    made = create({"_target_": "torch.nn.Linear", "in_features": 2, "bias": False}, nn.Module, "model", out_features=3)
    assert made.weight.shape == (3, 2)
    part = {"_target_": "torch.nn.ReLU", "inplace": True}
    create({"_target_": "mine.Part", "head": part, "heads": [part], "mask_type": "random"}, nn.Module, "model")
    assert [each.inplace for each in (executed[-1]["head"], *executed[-1]["heads"])] == [True, True]
    for config, group, key in (
        ({"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3, "outs": 3}, "model", "outs"),
        ({"_target_": "mine.Part", "head": {"_target_": "exp.backends.cpu.CpuBackend"}}, "model", r"head\._target_"),
        ({"_target_": "mine.Part", "head": {"type": "mine.Part"}}, "model", r"model\.head\.type"),
        ({"_target_": "mine.Part", "head": {"_scope_": "mine"}}, "model", r"model\.head\._scope_"),
        ({"_target_": "torch.nn.Identity", "part": part}, "data", r"data\.part\._target_"),
    ):
        with pytest.raises(ConfigError, match=key):
            create(config, nn.Module, group)


def test_registries_import_nothing(executed):
    for name in ("EMAHook", "mmengine.EMAHook", "mmengine.hooks.EMAHook"):
        assert lookup_class("hooks[0].type", name, HOOKS, Hook) is EMAHook
    for name in ("mine", "mine.Part", "os.system", "torch.nn.Linear", "EMAHok"):
        with pytest.raises(ConfigError, match=r"hooks\[0\]\.type"):
            lookup_class("hooks[0].type", name, HOOKS, Hook)
    sys.path.append(".")
    for name in ("mine", "mine.Part", "exp.config.command_line.nearest", "antigravity"):  # which opens a browser
        with pytest.raises(ConfigError, match=r"model\.head\.type"):
            check_type("model.head.type", name)
    for name in ("random", "no module", "ExponentialMovingAverage", "torch.nn.ReLU"):
        check_type("model.head.type", name)
    assert executed == []


def test_files_may_not_choose_for_the_user():
    for more in (
        {"model": {"_target_": "${there}"}, "there": "os.system"},
        {"hooks": [{"type": "evil.Hook"}]}, {"hooks": [{"type": "EMAHook", "ema_type": "evil.Average"}]},
        {"hooks": [{"type": "EMAHook", "_scope_": "evil"}]},
        {"data": {"pipeline": [{"type": "RandomChoice", "transforms": [[{"type": "os.system"}]]}]}},
        {"task": {"name": "../evil"}}, {"name": "../../elsewhere"}, {"data": {"name": "a/b"}},
    ):  # fmt: skip
        config = OmegaConf.create({"task": {"name": "train"}, "name": "x", "data": {"name": "y"}, **more})
        with pytest.raises(ConfigError):
            check_names(config)
    with pytest.raises(ConfigError, match="plugins"):
        trust_packages(["evil"], ["seed=1"])


def test_what_is_written_stays_below_the_run():
    check_path_part("data.name", "MMRS-1M 2")
    for part in ("/tmp/a", "..", ".hidden", "-rf", "a\tb", "", "a\\b", "~"):
        with pytest.raises(ConfigError, match="name"):
            check_path_part("name", part)
    with pytest.raises(ConfigError, match=r"hooks\[0\]\.json_trace_path"):
        check_hooks([{"type": "ProfilerHook", "json_trace_path": "../trace.json"}])


def test_a_module_is_looked_for_without_being_imported(tmp_path, monkeypatch):
    for file, text in (("loud", "raise SystemExit"), ("space/inner", "class Made: pass"), ("broken", "class Model(:")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for target in (
        "loud.Made",
        "space.inner.Made",
        "broken.Model",
        "exp.vision.models.Segmenter",
        "torch.nn.Linear",
    ):
        check_target("model._target_", target)
    for wrong in ("exp.forecasting.timebrige.TimeBridge", "TimeBridge", "nonesuch.Model", "space.other.Made"):
        with pytest.raises(ConfigError, match=f"model._target_={wrong}"):
            resolve("model._target_", wrong, object)
    with pytest.raises(UnavailableError, match=r"broken does not import \(SyntaxError"):
        resolve("model._target_", "broken.Model", object)
