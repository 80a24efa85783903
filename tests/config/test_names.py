"""What a configuration may name, and where: each place through the command line, with nothing executed."""

from __future__ import annotations

import os

import pytest
from omegaconf import OmegaConf

from exp.config.hooks import check_hooks
from exp.config.names import allow, check_object, check_path_part
from exp.config.targets import load_target
from exp.errors import ConfigError
from tests.conftest import TINY

# What would be left if a module of this name, or a command, had been run.
EVIL = """
open("executed", "w").close()
class Evil:
    def __init__(self, *_, **__):
        open("executed", "w").close()
"""

PLACES = {
    "model._target_=os.system": "model._target_=os.system",
    "launcher._target_=subprocess.Popen": "launcher._target_=subprocess.Popen",
    "backend._target_=shutil.rmtree": "backend._target_=shutil.rmtree",
    "+model.inner={_target_: pandas.read_pickle, path: x}": "model.inner._target_=pandas.read_pickle",
    "+launcher.more=[{_target_: hydra.utils.get_method, path: os.system}]": "launcher.more[0]._target_=hydra.utils",
    "hooks=[{type: os.system, command: touch executed}]": "hooks[0].type=os.system",
    "hooks=[{type: EMAHook, ema_type: evil.Evil}]": "hooks[0].ema_type=evil.Evil",
    "hooks=[{type: EMAHook, _scope_: evil}]": "hooks[0]._scope_=evil",
    "optim.type=evil.Evil": "optim.type=evil.Evil",
    "schedule.param_scheduler=[{type: evil.Evil}]": "schedule.param_scheduler[0].type=evil.Evil",
    "logger.vis_backends=[{type: evil.Evil}]": "logger.vis_backends[0].type=evil.Evil",
    "+data.pipeline=[{type: RandomChoice, transforms: [[{type: os.system}]]}]": "transforms[0][0].type=os.system",
    "task.name=../evil": "task.name=../evil",
    "name=../../elsewhere": "name='../../elsewhere'",
    "data.name=a/b": "data.name='a/b'",
}


@pytest.mark.slow
@pytest.mark.parametrize("override", PLACES)
def test_code_that_nobody_has_chosen_is_refused_before_anything_runs(exp, override):
    (exp.folder / "evil.py").write_text(EVIL)
    done = exp(*TINY, override)
    first = done.stderr.splitlines()[0]
    assert done.returncode == 2, done.stderr
    assert first.startswith(f"error: {PLACES[override]}") or PLACES[override] in first, first
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in exp.folder.iterdir() if path.name != "__pycache__") == ["evil.py"]


@pytest.mark.slow
def test_a_file_cannot_name_plugins_for_the_user(exp):
    folder = exp.folder / "conf" / "experiment"
    folder.mkdir(parents=True)
    (exp.folder / "evil.py").write_text(EVIL)
    (folder / "theirs.yaml").write_text(
        "# @package _global_\nplugins: [evil]\nname: theirs\nhooks: [{type: evil.Evil}]\n"
    )
    done = exp(*TINY, "hydra.searchpath=[file://conf]", "experiment=theirs")
    assert done.returncode == 2
    assert "plugins=[evil] stands in a file" in done.stderr.splitlines()[0]
    sweep = exp("-m", *TINY, "name=../elsewhere,../there")
    assert sweep.returncode == 2
    assert "name='../elsewhere' is no name for a folder" in sweep.stderr
    assert sorted(path.name for path in exp.folder.iterdir()) == ["conf", "evil.py"]


@pytest.mark.slow
def test_workers_refuse_what_no_text_shows(exp):
    (exp.folder / "evil.py").write_text(EVIL)
    for override, says in (
        ("model._target_=exp.cli.os.getcwd", "model._target_=os.getcwd"),
        ("optim.type=evil", "optim.type=evil is neither"),  # a module, which a registry would import
        ("optim.type=exp.config.targets.load_target", "optim"),
        ("hooks=[{type: exp.cli.os.system, command: touch executed}]", "hooks"),
    ):
        done = exp(*TINY, override)
        first = done.stderr.splitlines()[0]
        assert done.returncode == 2, done.stderr
        assert says in first
        assert "executed" not in {path.name for path in exp.folder.iterdir()}


@pytest.mark.slow
def test_what_the_user_names_is_his_word(exp):
    (exp.folder / "mine.py").write_text(
        "import torch\nfrom mmengine.hooks import Hook\nfrom mmengine.registry import OPTIMIZERS\n"
        "class Looks(Hook):\n    def after_run(self, runner):\n        open('seen', 'w').close()\n"
        "@OPTIMIZERS.register_module()\nclass Slow(torch.optim.SGD):\n    pass\n"
    )
    hooks = "hooks=[{type: mine.Looks}, {type: mmengine.hooks.EMAHook}]"
    exp.train("run", "plugins=[mine]", hooks, "optim.type=Slow")
    assert exp.path("seen").exists()
    missing = exp(*TINY, "plugins=[nonesuch]")
    assert (missing.returncode, "there is no module nonesuch" in missing.stderr) == (2, True)


def test_a_setting_may_be_called_as_a_module_of_pythons_is():
    from exp.engine.registries import choose_code

    choose_code(OmegaConf.create({"plugins": [], "model": {"mask_type": "random"}, "data": {"type": "array"}}))
    for wrong in ({"optim": {"type": "random"}}, {"data": {"train_pipeline": [{"type": "array"}]}}):
        with pytest.raises(ConfigError, match="is neither of exp nor in a registry"):
            choose_code(OmegaConf.create({"plugins": [], **wrong}))


def test_what_a_name_leads_to_counts_too():
    allow([])
    for name in ("exp.config.create.instantiate", "exp.forecasting.timebridge.TimeBridge.__init__.__globals__"):
        with pytest.raises(ConfigError):
            load_target("model._target_", name)
    assert load_target("model._target_", "torch.nn.Linear").__name__ == "Linear"
    with pytest.raises(ConfigError, match=r"plugins=\[posix\]"):
        check_object("hooks[0].type", "exp.cli.os.system", os.system)
    check_path_part("data.name", "MMRS-1M 2")
    for wrong in ("/tmp/a", "..", ".hidden", "-rf", "a\tb", "", "a\\b", "~"):
        with pytest.raises(ConfigError, match="no name for a folder"):
            check_path_part("name", wrong)
    for wrong in ("../trace.json", "/tmp/trace.json"):
        with pytest.raises(ConfigError, match=r"hooks\[0\].json_trace_path"):
            check_hooks([{"type": "ProfilerHook", "json_trace_path": wrong}])
