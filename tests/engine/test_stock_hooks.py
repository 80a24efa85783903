"""Every hook that MMEngine exports works here, or is refused; a new one fails until it has been decided."""

from __future__ import annotations

from pathlib import Path

import mmengine.hooks
import pytest

from exp.config.hooks import REFUSED, check_hooks
from exp.engine import checkpoint, stock_hooks
from exp.errors import ConfigError

TABLE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()


@pytest.fixture
def train(make_runner):
    """Trains two epochs of 16 steps with a hook of a configuration, and tests."""

    def run(**config):
        hooks = stock_hooks.build_hooks([config], "mse", greater_is_better=False)
        runner = make_runner(max_epochs=2, log_every=4, hooks=hooks)
        runner.load_or_resume()
        runner.train()
        content, runner.tested = runner.parts.saving.tested(runner)
        runner.tested["metrics"] = runner.test_with(content)
        return runner

    return run


def averages(train):
    runner = train(type="EMAHook", momentum=0.2)
    assert runner.tested["metrics"]["mse"] == runner.tested["validation"]["mse"]  # the same data here
    assert runner.parts.saving.best_path.is_file()


def times(train):
    scalars = train(type="IterTimerHook").message_hub.log_scalars
    assert len(scalars["train/time"].data[0]) == 32
    assert {"val/time", "test/time", "train/data_time"} <= set(scalars)


def stops(train):
    runner = train(type="EarlyStoppingHook", monitor="mse", patience=1, stopping_threshold=100.0)
    assert runner.iter == 16  # at once: below the threshold


def profiles(train):
    runner = train(type="ProfilerHook", record_shapes=True)
    assert "traceEvents" in (Path(runner.work_dir) / "profile.json").read_text()


def tells_every_step(train):
    hub = train(type="RuntimeInfoHook").message_hub
    assert [len(hub.get_scalar(f"train/{name}").data[0]) for name in ("loss", "lr")] == [32, 32]
    assert len(hub.get_scalar("val/mse").data[0]) == 2
    assert hub.get_info("max_iters") == 32


def empties(train):
    train(type="EmptyCacheHook", before_epoch=True, after_iter=True)


def synchronises(train):
    train(type="SyncBuffersHook")  # its effect on two ranks: tests/tasks/test_hooks.py


WORKS = {
    "EMAHook": averages,
    "EarlyStoppingHook": stops,
    "EmptyCacheHook": empties,
    "IterTimerHook": times,
    "ProfilerHook": profiles,
    "RuntimeInfoHook": tells_every_step,
    "SyncBuffersHook": synchronises,
}


@pytest.mark.parametrize("name", sorted(mmengine.hooks.__all__))
def test_each_of_mmengines_hooks_works_or_is_refused(name, train):
    assert (name in WORKS) != (name in REFUSED), "decide, and write it into docs/hooks.md"
    assert f"| `{name}` | {'works' if name in WORKS else 'refused'} |" in TABLE
    if name in WORKS:
        WORKS[name](train)
        return
    for kind in (name, f"mmengine.hooks.{name}"):
        with pytest.raises(ConfigError, match=f"hooks: {name} cannot be used here: "):
            check_hooks([{"type": kind}])
    check_hooks([{"type": f"mine.{name}"}])  # of the same name, and not MMEngine's


def test_what_is_derived_from_a_refused_hook_is_refused_as_well():
    class Mine(mmengine.hooks.LoggerHook):
        pass

    mmengine.registry.HOOKS.register_module(module=Mine, name="MyLogger", force=True)
    with pytest.raises(ConfigError, match="LoggerHook cannot be used here"):
        stock_hooks.build_hooks([{"type": "MyLogger"}], "mse", greater_is_better=False)


def test_a_checkpoint_of_a_cut_validation_holds_the_weights_of_the_training(make_runner):
    """Where a hook has put others in their place until the validation's end."""
    hooks = stock_hooks.build_hooks([{"type": "EMAHook", "momentum": 0.2}], "mse", greater_is_better=False)
    seen = {}

    class Cut(mmengine.hooks.Hook):
        def before_val(self, runner):
            seen["raw"] = runner.model.w.item()

        def before_val_iter(self, runner, batch_idx, data_batch=None):
            if batch_idx == 1:
                runner.parts.saving.save(runner, runner.iter, validation_due=True, waits=True)
                seen["averaged"] = runner.model.w.item()
                seen["content"] = checkpoint.read(runner.parts.saving.folder / "step_00000016.pth")

    runner = make_runner(hooks=[*hooks, Cut()])
    runner.train()
    content = seen["content"]
    assert content["meta"]["validation_due"]
    assert seen["raw"] != seen["averaged"]
    # As EMAHook writes them: what it has averaged as the weights, and those of the training beside it.
    assert content["state_dict"]["w"].item() == seen["averaged"]
    assert content["ema_state_dict"]["module.w"].item() == seen["raw"]


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
        stock_hooks.build_hooks([hook], "mse", False, ["mse"])

    with pytest.raises(ConfigError) as error:
        build()
    assert named in str(error.value)
