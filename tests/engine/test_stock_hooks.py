"""Every hook that MMEngine exports works here, or is refused; a new one fails until it has been decided."""

from __future__ import annotations

from pathlib import Path

import mmengine.hooks
import pytest

from exp.config.hooks import REFUSED, check_hooks
from exp.engine import checkpoint
from exp.engine.stock_hooks import build_hooks
from exp.errors import ConfigError

TABLE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()


def times(runner):
    scalars = runner.message_hub.log_scalars
    assert len(scalars["train/time"].data[0]) == 32
    assert {"val/time", "test/time", "train/data_time"} <= set(scalars)


def profiles(runner):
    assert "traceEvents" in (Path(runner.work_dir) / "profile.json").read_text()


def tells_every_step(runner):
    hub = runner.message_hub
    assert [len(hub.get_scalar(f"train/{name}").data[0]) for name in ("loss", "lr")] == [32, 32]
    assert len(hub.get_scalar("val/mse").data[0]) == 2
    assert hub.get_info("max_iters") == 32


def stops(runner):
    assert runner.iter == 16  # at once: below the threshold


def trains(runner):
    assert runner.iter == 32


# Options, and what to look at after a run; more of EMAHook, EarlyStoppingHook and SyncBuffersHook is in
# tests/behaviour/test_hooks.py.
WORKS = {
    "EMAHook": ({"momentum": 0.2}, trains),
    "EarlyStoppingHook": ({"monitor": "mse", "patience": 1, "stopping_threshold": 100.0}, stops),
    "EmptyCacheHook": ({"before_epoch": True, "after_iter": True}, trains),
    "IterTimerHook": ({}, times),
    "ProfilerHook": ({"record_shapes": True}, profiles),
    "RuntimeInfoHook": ({}, tells_every_step),
    "SyncBuffersHook": ({}, trains),
}


def test_each_of_mmengines_hooks_has_been_decided_upon():
    assert {*WORKS, *REFUSED} == set(mmengine.hooks.__all__)
    assert not {*WORKS} & {*REFUSED}
    for name in mmengine.hooks.__all__:
        assert f"| `{name}` | {'works' if name in WORKS else 'refused'} |" in TABLE


@pytest.mark.parametrize("name", sorted(WORKS))
def test_some_work(name, make_runner):
    """In two epochs of 16 steps, and a test."""
    options, look = WORKS[name]
    hooks = build_hooks([{"type": name, **options}], "mse", greater_is_better=False)
    runner = make_runner(max_epochs=2, log_every=4, hooks=hooks)
    runner.load_or_resume()
    runner.train()
    content, runner.tested = runner.saving.tested(runner)
    assert runner.test_with(content)["mse"] == runner.tested["validation"]["mse"]  # the same data here
    look(runner)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_some_are_refused(name):
    for kind in (name, f"mmengine.hooks.{name}"):
        with pytest.raises(ConfigError, match=f"hooks: {name} "):
            check_hooks([{"type": kind}])
    check_hooks([{"type": f"mine.{name}"}])  # of the same name, and not MMEngine's


def test_what_is_derived_from_a_refused_hook_is_refused_as_well():
    mine = type("Mine", (mmengine.hooks.LoggerHook,), {})
    mmengine.registry.HOOKS.register_module(module=mine, name="MyLogger", force=True)
    with pytest.raises(ConfigError, match="LoggerHook"):
        build_hooks([{"type": "MyLogger"}], "mse", greater_is_better=False)


class Cut(mmengine.hooks.Hook):
    """Saves within the first validation, as notice to end does."""

    def before_val(self, runner):
        self.raw = runner.model.w.item()

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        if batch_idx == 1:
            runner.saving.save(runner, runner.iter, validation_due=True, waits=True)
            self.averaged = runner.model.w.item()
            self.content = checkpoint.read(runner.saving.folder / "step_00000016.pth")


def test_a_checkpoint_of_a_cut_validation_holds_the_weights_of_the_training(make_runner):
    """Beside those that EMAHook has put in their place until the validation's end."""
    hooks, cut = build_hooks([{"type": "EMAHook", "momentum": 0.2}], "mse", greater_is_better=False), Cut()
    make_runner(hooks=[*hooks, cut]).train()
    assert cut.content["meta"]["validation_due"]
    weights = [cut.content["state_dict"]["w"], cut.content["ema_state_dict"]["module.w"]]
    assert weights == [cut.averaged, cut.raw]
    assert cut.averaged != cut.raw


@pytest.mark.parametrize(
    ("hook", "named"),
    [
        ({"type": "mmengine.hooks.CheckpointHook", "interval": 1}, "checkpoint.every_epochs"),
        ({"interval": 1}, "hooks[0]"),
        ({"type": "EMAHok"}, "EMAHook"),
        ({"type": "EMAHook", "begin_iter": -1}, "begin_iter"),
        ({"type": "EarlyStoppingHook", "monitor": "msee", "rule": "less"}, "mse"),
        ({"type": "EMAHook", "priority": "SILLY"}, "SILLY"),
    ],
)
def test_a_hook_that_cannot_work_is_refused_by_name(hook, named):
    def build():
        check_hooks([hook])
        build_hooks([hook], "mse", False, ["mse"])

    with pytest.raises(ConfigError) as error:
        build()
    assert named in str(error.value)
