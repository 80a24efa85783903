"""Whether a user's loss depends on how a batch is split: what is said, and that nothing of the training changes."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn

from exp.engine.invariance import SplitCheck
from exp.models.base import Model, has_user_loss
from exp.models.dropout import Dropout, DropoutStream

SAID = {
    "mean": "a mean over a number that varies",
    "norm": "batch norm (norm)",
    "draws": "random numbers that a global generator draws",
}


class Net(Model):
    """Two layers with a loss of the subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(1, 8), nn.Linear(8, 1)
        self.count = 0
        self.register_buffer("seen", torch.zeros(()))

    def between(self, hidden):
        return hidden

    def loss(self, out, y):
        return (out - y).square().mean()

    def forward(self, x, y=None, mode="loss"):
        out = self.outer(self.between(torch.tanh(self.inner(x[:, None]))))[:, 0]
        if mode != "loss":
            return out
        self.count += 1
        self.seen += x.sum().detach()
        return {"loss": self.loss(out, y)}


class Masked(Net):
    def loss(self, out, y):
        known = y.mul(9).remainder(2) > 1
        return (out - y)[known].square().sum() / known.sum().clamp(min=1)


class MaskedGradient(Net):
    """The loss is a constant; only its gradients depend on the split."""

    def loss(self, out, y):
        weight = (y.mul(9).remainder(2) > 1).float()
        return 1.0 + ((out - out.detach()) * weight).sum() / weight.sum().clamp(min=1)


class Compared(Net):
    def loss(self, out, y):
        return (out[:, None] - out[None] - y[:, None] + y[None]).square().mean()


class Declared(Compared):
    loss_is_mean = False


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def between(self, hidden):
        return self.norm(hidden)


class NormedMasked(Normed):
    loss = Masked.loss


class Dropped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def between(self, hidden):
        return self.drop(hidden)


class DroppedMasked(Dropped):
    loss = Masked.loss


class BySample(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = Dropout(0.5)

    def between(self, hidden):
        return self.drop(hidden)


class Drawing(Net):
    """Draws from another generator in each forward pass."""

    def between(self, hidden):
        return hidden * random.random() * np.random.rand()


class OwnStep(Net):
    def train_step(self, data, optim_wrapper):
        with optim_wrapper.optim_context(self):
            loss = self(**data)["loss"] + Masked.loss(self, self(data["x"] + 1, mode="tensor"), data["y"])
        optim_wrapper.update_params(loss)
        return {"loss": loss}


class OwnBackward(Net):
    """Computes gradients without the optimizer wrapper, so that their share in a batch is unknown."""

    def train_step(self, data, optim_wrapper):
        loss = self(**data)["loss"]
        loss.backward()
        optim_wrapper.step()
        optim_wrapper.zero_grad()
        return {"loss": loss}


class Fails(Net):
    def loss(self, out, y):
        assert len(y) == 4
        return super().loss(out, y)


@pytest.fixture
def train(make_runner):
    """Trains four steps, and gives the warnings, the weights, and the next random numbers."""

    def run(cls, checked=True, by_sample=False):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        model = cls()
        runner = make_runner(model, max_steps=4, optimizer=torch.optim.Adam(model.parameters(), lr=0.1))
        if by_sample:
            runner.train_loop.dropouts = DropoutStream(model, runner.sampler, 0)
        if checked:
            runner.register_hook(SplitCheck(runner.session))
        runner.val_loop = None
        runner.checkpoints.after_train = lambda runner: None
        runner.hooks = [hook for hook in runner.hooks if hook is not runner.checkpoints]
        runner.train()
        drawn = torch.rand(()).item(), random.random(), np.random.rand()
        return runner.session.warnings, model, drawn

    return run


@pytest.mark.parametrize(
    ("cls", "causes"),
    [
        (Net, ()),
        (Masked, ("mean",)),
        (MaskedGradient, ("mean",)),
        (Compared, ("mean",)),
        (Normed, ("norm",)),
        (NormedMasked, ("norm", "mean")),
        (Dropped, ("draws",)),
        (DroppedMasked, ("draws", "mean")),
        (BySample, ("draws",)),
        (Drawing, ("draws",)),
        (OwnStep, ("mean",)),
        (OwnBackward, ()),
        (Fails, ()),
    ],
)
def test_the_cause_is_named_and_the_training_is_the_same_to_the_last_digit(train, cls, causes):
    warnings, model, drawn = train(cls)
    assert len(warnings) == bool(causes)
    assert {key for key, text in SAID.items() if text in "".join(warnings)} == {*causes}
    _, plain, drawn_plain = train(cls, checked=False)
    assert drawn == drawn_plain
    assert model.count == plain.count
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_masks_by_sample_do_not_depend_on_the_split(train):
    assert train(BySample, by_sample=True)[0] == []
    assert SAID["draws"] in train(Dropped, by_sample=True)[0][0]


def test_it_asks_what_is_not_exps_own_and_does_not_declare_its_loss():
    assert has_user_loss(Net())
    assert not has_user_loss(Declared())
    assert not has_user_loss(nn.Sequential(nn.Linear(2, 2), Dropout(0.1)))
    assert has_user_loss(nn.Sequential(nn.Linear(2, 2), Net()))
    assert not has_user_loss(nn.Sequential(nn.Linear(2, 2), Declared()))
    for loss in (Masked.loss, functools.partial(Masked.loss, None), lambda out, y: out.mean()):
        ours = Dropout(0.1)  # a class of exp's that holds a user's loss
        ours.loss = loss
        assert has_user_loss(ours)
    ours.loss = nn.functional.mse_loss
    assert not has_user_loss(ours)
