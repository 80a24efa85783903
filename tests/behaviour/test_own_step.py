"""A model's own train_step, and parameters without a gradient, on several ranks."""

from __future__ import annotations

import shutil

import pytest

from tests.behaviour.conftest import first_line, losses, ran, result

CODE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from exp.data.base import Data
from exp.metrics import SampleMetric
from exp.models.base import Model

class Rows(Dataset):
    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 8, generator=generator)
        self.y = self.x.sum(1) + 0.1 * torch.randn(n, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}

class Error(SampleMetric):
    names = ("error",)
    greater_is_better = False

    def per_sample(self, outputs, batch):
        return (outputs - batch["y"]).abs()

class Toy(Data):
    def __init__(self, name):
        self.train, self.val, self.test = Rows(240, 0), Rows(50, 1), Rows(51, 2)

    def metrics(self, detailed=False):
        return Error()

class Net(Model):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x, y=None, mode="tensor"):
        out = self.b(torch.tanh(self.a(x))).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, y)} if mode == "loss" else out

class Step:
    def train_step(self, data, optim_wrapper):  # inherited from a class that is no model
        with optim_wrapper.optim_context(self):
            losses = self(**data, mode="loss")
            losses["loss_far"] = 10 * self(data["x"] + 1.0, mode="tensor").square().mean()
        loss, log_vars = self.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return log_vars

class Own(Step, Net):
    pass

class Turns(Net):
    # Two updates per step, as of a GAN. The second, with a penalty on gradients, leaves the first layer unchanged, so
    # Adam must not move it; the last layer never has a gradient.
    def __init__(self, seconds=1, of_rank=0):
        super().__init__()
        self.seconds, self.of_rank, self.unused = seconds, of_rank, nn.Linear(2, 2)

    def train_step(self, data, optim_wrapper):
        rank = dist.get_rank() if dist.is_initialized() else 0
        with optim_wrapper.optim_context(self):
            loss = self(**data, mode="loss")["loss"]
        optim_wrapper.update_params(loss)
        for _ in range(self.seconds + self.of_rank * rank):
            self.a.requires_grad_(False)
            x = (data["x"] + 1).requires_grad_()
            with optim_wrapper.optim_context(self):
                out = self(x, mode="tensor")
                (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                second = slope.square().sum(1).mean() + (out - 1).square().mean()
            optim_wrapper.update_params(second)
            self.a.requires_grad_(True)
        return {"loss": loss}

class Seldom(Net):
    def train_step(self, data, optim_wrapper):
        return {"loss": self(**data, mode="loss")["loss"].detach()}

class Masked(Net):
    # A mean over the targets above 0, of which each micro-batch has another number.
    def forward(self, x, y=None, mode="tensor"):
        out = super().forward(x)
        return {"loss": (out - y)[y > 0].square().sum() / (y > 0).sum().clamp(min=1)} if mode == "loss" else out

class Branch(Net):
    # Rank 1 leaves a layer out in a forward pass: the 7th, or another.
    def __init__(self, at=7):
        super().__init__()
        self.extra, self.at, self.count = nn.Linear(8, 16), at, 0

    def forward(self, x, y=None, mode="tensor"):
        hidden = torch.tanh(self.a(x))
        self.count += mode == "loss"
        if mode != "loss" or self.count != self.at or not dist.is_initialized() or not dist.get_rank():
            hidden = hidden + torch.tanh(self.extra(x))
        out = self.b(hidden).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, y)} if mode == "loss" else out
"""
RUN = [
    "--config-dir", "my_conf", "experiment=toy", "backend=cpu", "max_epochs=null", "max_steps=10", "optim.lr=0.01",
    "global_batch_size=16", "log_every=1", "plots=false", "overwrite=true", "sanity_check=false",
]  # fmt: skip
OWN = 7.687410
"""The loss of step 10 of ``Own``, as a loop of ten lines gives it in one process."""


@pytest.fixture
def toy(exp):
    (exp.folder / "toys.py").write_text(CODE)
    for group in ("model", "data", "experiment"):
        (exp.folder / "my_conf" / group).mkdir(parents=True)
    for name, keys in (
        ("own", ""),
        ("turns", "seconds: 1\nof_rank: 0\n"),
        ("seldom", ""),
        ("masked", ""),
        ("branch", "at: 7\n"),
    ):
        text = f"_target_: toys.{name.title()}\n{keys}"
        (exp.folder / "my_conf" / "model" / f"{name}.yaml").write_text(text)
    (exp.folder / "my_conf" / "data" / "toy.yaml").write_text("_target_: toys.Toy\nname: toy\n")
    (exp.folder / "my_conf" / "experiment" / "toy.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /data: toy\n  - override /model: own\nname: toy\n"
    )

    def run(*words, code=0):
        done = ran(exp, *RUN, *words, "output_dir=run", code=code)
        return done if code else losses(exp.path("run"))

    return run


def test_a_train_step_of_ones_own_trains_alike_on_any_number_of_ranks(toy, exp):
    alone = toy("nproc=1")
    assert alone[10] == pytest.approx(OWN, rel=1e-5)
    assert toy("nproc=2") == pytest.approx(alone, rel=1e-5)
    turns = toy("model=turns", "nproc=1", "optim.clip_grad_norm=5.0")
    assert toy("model=turns", "nproc=2", "optim.clip_grad_norm=5.0", "wrapper=ddp") == pytest.approx(turns, rel=1e-5)
    assert result(exp.path("run"))["wrapper"] == "ddp"


@pytest.mark.extended
def test_it_trains_alike_with_micro_batches_in_bf16_and_on_cards(toy):
    alone = toy("nproc=1", "accumulate=2")
    assert alone[10] == pytest.approx(OWN, rel=1e-5)
    assert toy("nproc=4", "accumulate=2") == pytest.approx(alone, rel=1e-5)
    assert toy("nproc=2", "precision=bf16")[10] == pytest.approx(OWN, rel=1e-2)
    turns = toy("model=turns", "nproc=1")
    cards = ["model=turns", "backend=gcu", "backend.simulate=true", "nproc=2"]
    assert toy(*cards) == pytest.approx(turns, rel=1e-5)
    assert toy(*cards, "backend.process_group=gloo") == pytest.approx(turns, rel=1e-5)


def test_what_cannot_be_done_with_it_is_refused_before_the_first_step(toy, exp):
    for words, code, named in (
        (["model=turns", "accumulate=2"], 2, "accumulate=2"),
        (["model=turns", "nproc=2", "wrapper.broadcast_buffers=true"], 2, "wrapper.broadcast_buffers"),
        (["model=turns", "nproc=2", "wrapper.options.static_graph=true"], 2, "wrapper.options.static_graph"),
        (["model=turns", "nproc=2", "model.of_rank=1"], 1, "often"),
        (["model=seldom"], 2, "update_params"),
    ):
        shutil.rmtree(exp.path("run"), ignore_errors=True)
        said = first_line(toy(*words, code=code))
        assert named in said, said
        assert not (exp.path("run") / "metrics.jsonl").exists()


def test_a_loss_that_depends_on_the_split_of_a_batch_is_said_and_recorded(toy, exp):
    toy("model=masked", "nproc=2", "sanity_check=true")
    (warning,) = result(exp.path("run"))["warnings"]
    assert "toys.Masked" in warning
    assert "a mean over a number that varies" in warning


WAITS = ["model=branch", "nproc=2", "launcher.timeout_s=600"]


def says_which(toy, step, *words):
    said = first_line(toy(*WAITS, *words, code=1))
    assert f"step {step} for extra.weight, extra.bias" in said, said
    assert "rank 1" in said
    assert "wrapper.find_unused_parameters=true" in said


def test_a_parameter_without_a_gradient_on_one_rank_is_named(toy):
    says_which(toy, 7, "log_every=50")


@pytest.mark.extended
def test_it_is_named_at_each_step_and_trains_if_it_is_allowed(toy):
    says_which(toy, 1, "model.at=1")
    says_which(toy, 2, "model.at=4", "accumulate=2", "log_every=50")
    assert toy(*WAITS, "wrapper.find_unused_parameters=true")[10] > 0
