"""What one step, one validation and one checkpoint are, when they come."""

from __future__ import annotations

import json

import pytest
import torch
from mmengine.hooks import Hook

from exp.data.loader import TrainBatchSampler
from exp.engine.checkpoint.reader import nonfinite_tensors, read_checkpoint
from exp.engine.hooks import LossMeter
from exp.engine.preemption import PreemptionHook
from exp.errors import ConfigError, Preempted, RunError
from tests.engine.conftest import Line, Mse, Samples, Spy

NAN, INF = float("nan"), float("inf")


class Given(Mse):
    """Gives these values, one after another, whatever it measures."""

    def __init__(self, *given):
        super().__init__()
        self.given = list(given)

    def compute(self, distributed):
        return {"mse": self.given.pop(0)}


def test_gradients_are_cleared_without_torchs_own_method_whose_profiler_range_takes_longer_than_that(make_runner):
    with torch.autograd.profiler.profile() as profile:
        make_runner().train()
    ranges = {event.name.partition("#")[0] for event in profile.function_events}
    assert {name for name in ranges if name.startswith("Optimizer.")} == {"Optimizer.step"}


@pytest.mark.parametrize(
    ("val_every", "max_steps", "expected"),
    [(None, None, [16, 32]), (5, None, [5, 10, 15, 20, 25, 30, 32]), (16, None, [16, 32]), (None, 20, [16, 20]),
     (10, 20, [10, 20]), (100, 20, [20])],
)  # fmt: skip
def test_validation_by_epochs_or_by_steps_and_always_at_the_end(make_runner, val_every, max_steps, expected):
    spy = Spy(lambda runner: runner.model.training)
    runner = make_runner(max_epochs=2, max_steps=max_steps, val_every=val_every, hooks=[spy])
    runner.train()
    records = map(json.loads, runner.session.folder.metrics.read_text().splitlines())
    assert [record["step"] for record in records if record["split"] == "val"] == expected
    assert all(spy.seen)  # a validation in mid-epoch leaves the model in this mode


def test_hooks_have_stages_before_and_after_clipping_in_the_order_of_their_priorities(make_runner):
    """By hand: of all samples x = 0 .. 1 and y = 3 x, the gradient of (w x - y)^2 is 2 x (w x - y)."""
    seen = []

    class Look(Hook):
        def __init__(self, name, priority):
            self.name, self.priority = name, priority

        def before_clipping(self, runner):
            seen.append((self.name, "before", runner.iter, runner.model.w.grad.item()))

        def after_clipping(self, runner):
            seen.append((self.name, "after", runner.iter, runner.model.w.grad.item()))

    class Reverse(Hook):
        def after_clipping(self, runner):
            runner.model.w.grad.neg_()

    runner = make_runner(max_steps=1, hooks=[Look("late", "LOW"), Reverse(), Look("early", "HIGH")])
    runner.optim_wrapper.clip_grad_norm = 0.5
    runner.train()
    names = [(name, stage) for name, stage, _, _ in seen]
    assert names == [("early", "before"), ("late", "before"), ("early", "after"), ("late", "after")]
    x = Samples()[next(iter(TrainBatchSampler(64, batch_size=4)))]["x"]
    gradient = (2 * x * (0 * x - 3 * x)).mean().item()
    assert gradient < -0.5
    assert [value for _, _, _, value in seen] == pytest.approx([gradient, gradient, -0.5, 0.5], rel=1e-4)
    assert [step for _, _, step, _ in seen] == [0] * 4
    assert runner.model.w.item() == pytest.approx(-0.1 * 0.5, rel=1e-4)


def test_a_checkpoint_after_an_epoch_does_not_end_it_again(make_runner):
    """Without a validation there, it is written after the schedulers of epochs have taken their step."""
    runner = make_runner(max_epochs=2, val_every=1000)
    runner.train()
    content = read_checkpoint(runner.saving.folder / "step_00000016.pth")
    assert (content["meta"]["epoch"], content["meta"]["samples"]) == (1, 0)


def test_a_buffer_may_hold_infinity_as_masks_do():
    weights = {"w": torch.ones(2), "b": torch.tensor([INF]), "none": torch.zeros(0), "half": torch.full((70000,), 2.0)}
    weights["half"] = weights["half"].half()  # their sum is not finite
    buffers = {"mask": torch.tensor([0.0, -INF]), "mean": torch.tensor([NAN]), "count": torch.tensor(3)}
    assert nonfinite_tensors({**buffers, **weights}, set(weights)) == ["mean", "b"]


@pytest.mark.parametrize("form", [lambda value: value, lambda value: {"y": [value]}])
def test_predictions_that_are_nan_end_the_run_whatever_the_metric_makes_of_them(make_runner, form):
    class Broken(Line):
        def forward(self, x, y, mode="loss"):
            return form(torch.where(x > 0.9, torch.full_like(x, NAN), torch.full_like(x, -INF)))

    blind = Given(1.0)
    blind.update = lambda outputs, batch: None
    with pytest.raises(RunError, match="NaN in the validation split, first in batch"):
        make_runner(model=Broken(), metrics=[blind]).val_loop.run()


def test_several_losses_are_summed_by_name_and_others_are_logged():
    losses = {"time_loss": torch.tensor(2.0), "loss_kl": torch.tensor(3.0), "accuracy": torch.tensor(7.0)}
    assert Line().parse_losses(losses) == (5.0, {**losses, "loss": 5.0})


class Notice(Hook):
    """Gives notice at one batch, and keeps the batches of validations."""

    def __init__(self, stage, at):
        self.stage, self.at, self.given, self.validated = stage, at, False, []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.given |= (self.stage, self.at) == ("train", batch_idx)

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.validated.append(batch_idx)
        self.given |= (self.stage, self.at) == ("val", batch_idx)


class Replaces(Notice):
    """Puts other weights into the model for a validation, so that no checkpoint can be written meanwhile."""

    def before_val(self, runner):
        pass


@pytest.mark.parametrize(
    ("notice", "saved", "due", "validated"),
    [(Notice("train", 3), 4, False, 0), (Notice("train", 15), 16, True, 0), (Notice("val", 2), 16, True, 3),
     (Replaces("train", 15), 16, True, 0), (Replaces("val", 2), 17, False, 64)],
)  # fmt: skip
def test_notice_ends_a_training_after_its_step_and_a_validation_after_its_batch(
    make_runner, notice, saved, due, validated
):
    """A validation of 64 batches follows step 16; one that was cut short comes first when the training goes on."""
    runner = make_runner(max_epochs=2, hooks=[notice])
    next(hook for hook in runner.hooks if isinstance(hook, PreemptionHook)).preempted = lambda: notice.given
    with pytest.raises(Preempted) as ended:
        runner.train()
    assert (ended.value.step, notice.validated) == (saved, [*range(validated)])
    runner.close()
    meta = read_checkpoint(runner.saving.folder / f"step_{saved:08d}.pth")["meta"]
    assert (meta["step"], meta["samples"], meta["validation_due"]) == (saved, saved * 4 % 64, due)
    later = make_runner(max_epochs=2)
    later.train(lambda: later.train_loop.restore(meta["epoch"], saved, meta["samples"], meta["validation_due"]))
    records = map(json.loads, later.session.folder.metrics.read_text().splitlines())
    assert [record["step"] for record in records if record["split"] == "val"] == [16, 32]


def test_losses_between_two_lines_are_shared_by_another_number_of_ranks():
    saved = [{"loss": (6.0, 3), "loss_b": (1.0, 1)}, {"loss": (2.0, 1)}]
    for rank, parts, expected in (
        (1, [4, 4], {"loss": (2.0, 1)}),
        (0, [4], {"loss": (8.0, 4), "loss_b": (1.0, 1)}),
        (2, [4, 4, 4, 4], {"loss": (2.0, 1), "loss_b": (0.25, 0.25)}),
        (1, [2, 6], {"loss": (4.0, 2), "loss_b": (0.5, 0.5)}),
    ):
        meter = LossMeter()
        meter.load(saved, [4, 4], parts, rank, torch.device("cpu"))
        assert meter.state() == expected
        meter.add({"loss": torch.tensor(4.0)})
        total, count = expected["loss"]
        means, single = meter.read()
        assert (means["loss"], single) == ((total + 4.0) / (count + 1), [4.0])
        assert meter.state() == {}


@pytest.mark.parametrize(
    ("losses", "named"),
    [
        (None, "NoneType"),
        ({"loss": 1.5}, "loss, a float"),
        ({"loss": torch.ones(4)}, r"loss, a Tensor of shape \(4,\)"),
    ],
)
def test_what_a_train_step_returns_instead_of_losses_is_named(losses, named):
    with pytest.raises(ConfigError, match=f"train_step must return .*{named}"):
        LossMeter().add(losses)
