from __future__ import annotations

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.runner import BaseLoop

from exp.engine import checkpoint
from exp.engine.soundness import not_finite
from exp.errors import RunError
from tests.engine.conftest import Line


def test_no_value_is_read_from_the_device_between_two_logs(make_runner, monkeypatch):
    reads = []
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__"):
        real = getattr(torch.Tensor, name)

        def counted(self, *args, _real=real, _name=name, **kwargs):
            reads.append(_name)
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)

    class ForgetTheFirst(Hook):
        """Making the loader's iterator reads a seed, on the CPU, once per epoch."""

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if batch_idx == 0:
                reads.clear()

    runner = make_runner(log_every=1000, hooks=[ForgetTheFirst()])
    monkeypatch.setattr(type(runner.parts.metrics), "_read", lambda *_: None)
    runner.run_steps()
    assert runner.iter == 16
    assert reads == []


def test_one_iteration_is_one_optimizer_step_at_any_accumulation(make_runner):
    seen = []

    class Spy(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            seen.append((runner.iter, batch_idx))

    runner = make_runner(accumulate=4, hooks=[Spy()])
    runner.run_steps()
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert runner.epoch == 1
    assert runner.parts.sampler.samples == 0


def test_accumulated_gradients_are_those_of_the_whole_batch(make_runner):
    accumulated = make_runner(accumulate=4)
    accumulated.run_steps()
    # By hand: the same permutation in batches of 16.
    w = torch.zeros(1, requires_grad=True)
    sampler = accumulated.parts.sampler
    sampler.set_position(0, 0)
    x = torch.linspace(0, 1, 64)
    for index in torch.cat(list(sampler)).split(16):
        (gradient,) = torch.autograd.grad((w * x[index] - 3 * x[index]).square().mean(), w)
        w = (w - 0.1 * gradient).detach().requires_grad_()
    assert torch.allclose(accumulated.model.w, w, atol=1e-6)


def test_a_loss_that_is_not_finite_ends_the_run_with_the_steps_named(make_runner):
    runner = make_runner(model=Line(poison=7), log_every=5)
    with pytest.raises(RunError, match=r"loss is (inf|nan) on rank 0 within the 5 steps before step 10"):
        runner.run_steps()


class Validations(BaseLoop):
    """Notes when it is run, and gives the metrics that it was given."""

    def __init__(self, runner, dataloader, evaluator, stage, values=()):
        super().__init__(runner, dataloader)
        self.steps, self.values = [], list(values)

    def run(self):
        runner = self.runner
        self.steps.append(runner.iter)
        runner.model.eval()
        runner.call_hook("before_val_epoch")
        runner.call_hook("after_val_epoch", metrics={"mse": self.values.pop(0) if self.values else 1.0})


@pytest.mark.parametrize(
    ("val_every", "max_steps", "expected"),
    [(None, None, [16, 32]), (5, None, [5, 10, 15, 20, 25, 30, 32]), (16, None, [16, 32]), (None, 20, [16, 20]),
     (10, 20, [10, 20]), (100, 20, [20])],
)  # fmt: skip
def test_validation_by_epochs_or_by_steps_and_always_at_the_end(make_runner, val_every, max_steps, expected):
    runner = make_runner(max_epochs=2, val=Validations, max_steps=max_steps, val_every=val_every)
    trained = []

    class Mode(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            trained.append(runner.model.training)

    runner.register_hook(Mode())
    runner.train_loop.run()
    assert runner.val_loop.steps == expected
    assert all(trained)  # validation in mid-epoch leaves the model in training mode


def test_checkpoints_by_steps_wait_for_the_validation_there(make_runner):
    runner = make_runner(val=Validations, values=[2.0, 3.0], val_every=8)
    saving = runner.parts.saving
    saving.every_steps, saving.every_epochs, saving.keep_last = 8, 0, 10
    runner.train_loop.run()
    names = [path.name for path in checkpoint.list_checkpoints(saving.folder)]
    assert names == ["step_00000016.pth", "step_00000008.pth"]
    kept = checkpoint.read(saving.folder / "step_00000008.pth")
    assert kept["best"]["best"] == 2.0  # what the validation at that step found


def test_a_checkpoint_after_an_epoch_does_not_end_it_again(make_runner):
    """Without a validation there, it is written after the schedulers of epochs have taken their step."""
    runner = make_runner(max_epochs=2, val=Validations, values=[2.0], val_every=1000)
    runner.train_loop.run()
    content = checkpoint.read(runner.parts.saving.folder / "step_00000016.pth")
    assert (content["meta"]["epoch"], content["meta"]["samples"]) == (1, 0)


def test_weights_that_are_not_finite_are_not_saved(make_runner):
    class Breaks(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if batch_idx == 9:
                runner.model.w.data.fill_(float("nan"))

    runner = make_runner(log_every=100, hooks=[Breaks()])
    saving = runner.parts.saving
    saving.every_steps = 5
    with pytest.raises(RunError, match=r"not finite after step 10: .*, on rank 0; the weights are not saved"):
        runner.run_steps()
    assert [path.name for path in checkpoint.list_checkpoints(saving.folder)] == ["step_00000005.pth"]


def test_a_buffer_may_hold_infinity_as_masks_do():
    nan, inf = float("nan"), float("inf")
    state = {
        "mask": torch.tensor([0.0, -inf]),
        "mean": torch.tensor([nan]),
        "count": torch.tensor(3),
        "w": torch.ones(2),
        "b": torch.tensor([inf]),
        "none": torch.zeros(0),
        "half": torch.full((70000,), 2.0).half(),
    }
    assert not_finite(state, {"w", "b", "none", "half"}) == ["mean", "b"]


@pytest.mark.parametrize("form", [lambda value: value, lambda value: {"y": [value]}])
def test_predictions_that_are_nan_end_the_run_whatever_the_metric_makes_of_them(make_runner, form):
    class Broken(Line):
        def forward(self, x, y, mode="loss"):
            if mode == "predict":
                return form(torch.where(x > 0.9, torch.full_like(x, float("nan")), torch.full_like(x, -float("inf"))))
            return super().forward(x, y, mode)

    class Blind:
        def reset(self):
            self.batches = 0

        def update(self, outputs, batch):
            self.batches += 1

        def compute(self, distributed):
            return {"mse": 1.0}

    runner = make_runner(model=Broken(), evaluator=Blind())
    with pytest.raises(RunError, match=r"predictions are NaN in \d of \d+ validation batches, first in batch \d+ of "):
        runner.val_loop.run()
