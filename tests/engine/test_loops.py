"""What one step, one validation and one checkpoint are, when they come."""

from __future__ import annotations

import json

import pytest
import torch

from exp.engine import checkpoint
from exp.errors import RunError
from tests.engine.conftest import Line, Mse, Spy

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


def test_a_checkpoint_after_an_epoch_does_not_end_it_again(make_runner):
    """Without a validation there, it is written after the schedulers of epochs have taken their step."""
    runner = make_runner(max_epochs=2, val_every=1000)
    runner.train()
    content = checkpoint.read(runner.saving.folder / "step_00000016.pth")
    assert (content["meta"]["epoch"], content["meta"]["samples"]) == (1, 0)


def test_a_buffer_may_hold_infinity_as_masks_do():
    weights = {"w": torch.ones(2), "b": torch.tensor([INF]), "none": torch.zeros(0), "half": torch.full((70000,), 2.0)}
    weights["half"] = weights["half"].half()  # their sum is not finite
    buffers = {"mask": torch.tensor([0.0, -INF]), "mean": torch.tensor([NAN]), "count": torch.tensor(3)}
    assert checkpoint.not_finite({**buffers, **weights}, set(weights)) == ["mean", "b"]


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
