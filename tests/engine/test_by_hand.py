"""A training is what a few lines of plain Python compute, and not only what exp computed before or on other ranks."""

from __future__ import annotations

import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exp.data.base import Data
from exp.distributed import Distributed, rng_state, seed_everything, set_rng_state
from exp.engine.build import build_data, build_model
from exp.engine.checkpoint.reader import read_checkpoint
from exp.engine.checkpoint.resume import find_resume
from exp.engine.checkpoint.writer import write_checkpoint
from exp.engine.train import build_trainer, train
from exp.models.base import Model
from tests.engine.conftest import Line, Mse

X = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
Y = [1.0, 0.0, 2.0, 1.0, 3.0, 2.0, 5.0, 3.0]
ORDERS = [1, 7, 4, 6, 2, 0, 3, 5], [0, 4, 5, 2, 1, 3, 7, 6], [0, 1, 3, 5, 2, 4, 7, 6]  # of seed 2023, by epoch
LR, MOMENTUM, DECAY, CLIP, SEED = 0.2, 0.9, 0.01, 2.0, 2023
SETTINGS = {
    "optim": {"type": "SGD", "lr": LR, "weight_decay": DECAY, "clip_grad_norm": CLIP,
              "options": {"momentum": MOMENTUM}},
    "schedule": {"param_scheduler": [{"type": "ExponentialLR", "gamma": 0.5, "by_epoch": True}]},
    "checkpoint": {"every_steps": 1, "keep_last": 9},
    "data": {"_target_": f"{__name__}.Points"}, "model": {"_target_": f"{__name__}.Noisy"}, "metric": "near",
    "batch_size": 2, "accumulate": 2, "global_batch_size": 4, "max_epochs": 3, "log_every": 1, "plots": False,
    "backend": {"name": "cpu"}, "wrapper": {"kind": "none"},
    "launcher": {"_target_": "auto", "nnodes": 1, "min_nnodes": None, "mixed": False},
}  # fmt: skip


class Noisy(Model):
    """A line, whose loss is weighted by numbers of every random generator."""

    def __init__(self):
        super().__init__()
        self.w, self.b = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))

    def forward(self, x, y, mode="loss"):
        line = self.w * x + self.b
        assert self.training is (mode == "loss")
        if mode == "predict":
            return line
        noise = float(torch.rand(())) + random.random() + random.gauss(0, 1) + np.random.rand() + np.random.randn()
        return {"loss": noise * (line - y).square().mean()}


class Near(Mse):
    names, greater_is_better = ("near",), True

    def per_sample(self, outputs, batch):
        return 1 / (1 + super().per_sample(outputs, batch))


class Points(Data):
    def __init__(self):
        self.train = self.val = self.test = [{"x": np.float32(x), "y": np.float32(y)} for x, y in zip(X, Y)]

    def metrics(self, detailed=False):
        return [Mse(), Near()]


def by_hand():
    """Losses by step; the metrics after each epoch; and the weights in the end."""
    python, numpy, torchs = random.Random(SEED), np.random.RandomState(SEED), torch.Generator()
    torchs.manual_seed(SEED)
    (w, b), (speed_w, speed_b), rate, losses, metrics = (0.0, 0.0), (0.0, 0.0), LR, [], []
    for order in ORDERS:
        for step in (order[:4], order[4:]):
            loss = slope_w = slope_b = 0.0
            for part in (step[:2], step[2:]):
                noise = float(torch.rand((), generator=torchs)) + python.random() + python.gauss(0, 1)
                noise += numpy.rand() + numpy.randn()
                for error, x in ((w * X[i] + b - Y[i], X[i]) for i in part):
                    loss += noise * error**2 / 4
                    slope_w, slope_b = slope_w + noise * 2 * error * x / 4, slope_b + noise * 2 * error / 4
            shrink = min(1.0, CLIP / (math.hypot(slope_w, slope_b) + 1e-6))
            speed_w = MOMENTUM * speed_w + shrink * slope_w + DECAY * w
            speed_b = MOMENTUM * speed_b + shrink * slope_b + DECAY * b
            w, b = w - rate * speed_w, b - rate * speed_b
            losses.append(loss)
        errors = [(w * x + b - y) ** 2 for x, y in zip(X, Y)]
        metrics.append((sum(errors) / 8, sum(1 / (1 + error) for error in errors) / 8))
        rate /= 2
    return losses, metrics, (w, b)


@pytest.fixture
def trained(make_session):
    """Trains as ``task=train`` does, in this process; gives the result, the losses, the validations and the session."""

    def run(**settings):
        session = make_session(**{**SETTINGS, **settings})
        session.folder.create()
        result = train(session, lambda *_: {}, lambda *_: None)
        lines = [json.loads(line) for line in session.folder.metrics.read_text().splitlines()]
        losses = {line["step"]: line["loss"] for line in lines if line["split"] == "train"}
        return result, losses, [line for line in lines if line["split"] == "val"], session

    return run


def test_losses_metrics_and_weights_are_those_worked_out_by_hand_also_when_continued(trained):
    """With every part of a step: micro-batches, clipping, weight decay, momentum, schedule, and random numbers."""
    losses, metrics, weights = by_hand()
    result, *found, session = trained()
    assert found[0] == pytest.approx(dict(enumerate(losses, 1)), rel=1e-4)
    assert [(line["mse"], line["near"]) for line in found[1]] == [pytest.approx(each, rel=1e-4) for each in metrics]
    state = torch.load(str(session.folder.checkpoints / "step_00000006.pth"))["state_dict"]
    assert [float(state[name]) for name in "wb"] == pytest.approx(weights, rel=1e-4)
    best = (result["tested_epoch"], result["tested_step"], result["metric"], result["validation"]["near"])
    assert best == (1, 2, pytest.approx(metrics[0][1], rel=1e-4), pytest.approx(metrics[0][1], rel=1e-4))
    for step in (2, 3):  # between two epochs, and within one
        random.seed(1), np.random.seed(1), torch.manual_seed(1), random.gauss(0, 1), np.random.randn()
        name = f"step_{step:08d}.pth"
        again, *found, _ = trained(resume=str(session.folder.checkpoints / name))
        assert again["resumed_from"].endswith(name)
        assert found[0] == pytest.approx(dict(enumerate(losses, 1)), rel=1e-4)
        assert (again["metrics"], again["tested_step"]) == (result["metrics"], 2)


def draws(card=None):
    """The next number of every generator."""
    own = [] if card is None else [float(torch.rand((), generator=card))]
    return [*own, float(torch.rand(())), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]


def draws_of(seed, skipped=0):
    """The same of new generators, after ``skipped`` of them."""
    python, numpy, torchs = random.Random(seed), np.random.RandomState(seed), torch.Generator()
    torchs.manual_seed(seed)
    for _ in range(skipped + 1):
        first = [float(torch.rand((), generator=torchs)), python.random(), python.gauss(0, 1)]
        found = [*first, numpy.rand(), numpy.randn()]
    return found


def test_every_generator_is_seeded_and_goes_on_from_what_a_checkpoint_has(tmp_path):
    """Also those that draw normal numbers in pairs, and keep the second of the pair."""
    card = torch.Generator()  # stands for the one of a card
    module = {"manual_seed_all": card.manual_seed, "get_rng_state": card.get_state, "set_rng_state": card.set_state}
    backend = SimpleNamespace(torch_module=SimpleNamespace(**module), device_type="acme")
    seed_everything(7, backend)
    first = draws_of(7)
    assert draws(card) == [first[0], *first]
    write_checkpoint(tmp_path / "step_1.pth", {"rng": rng_state(backend)})
    seed_everything(8, backend), draws(card)
    set_rng_state(read_checkpoint(tmp_path / "step_1.pth")["rng"], backend)
    second = draws_of(7, skipped=1)
    assert draws(card) == [second[0], *second]


class Twin(Distributed):
    """One of two ranks. The other has 3 wherever numbers are added; rank 1 hears what rank 0 has said before."""

    def __init__(self, rank, said):
        super().__init__(rank, 2)
        self.said = said

    def sum(self, value):
        return value.add_(3)

    def gather(self, value):
        if self.is_main:
            self.said.append(value)
        return [value if self.is_main else self.said.pop(0), value]

    gather_to_main = gather


def test_ranks_draw_other_numbers_each_also_when_another_number_of_ranks_goes_on(trained, make_session):
    *_, before = trained()
    said = []
    for rank in (0, 1):
        session = make_session(rank, 2, **{**SETTINGS, "batch_size": 1, "resume": str(before.folder.path)})
        session.distributed = Twin(rank, said)
        data = build_data(session)
        trainer = build_trainer(session, data, build_model(session, data, for_training=True))
        assert draws() == draws_of(SEED + rank)
        trainer.call_hook("before_run")
        find_resume(trainer)[1]()
        assert draws() == draws_of(SEED + rank + 6 * 1000003)


def test_a_checkpoint_has_the_mean_of_the_buffers_of_all_ranks(make_runner):
    model = Line()
    model.register_buffer("level", torch.tensor([1.0, 5.0]))
    model.register_buffer("count", torch.tensor(4))
    runner = make_runner(model)
    runner.distributed_group, runner.world_size = Twin(0, []), 2
    state = runner.training_checkpoint(0, {})["state_dict"]
    assert (state["level"].tolist(), state["count"].item()) == ([2.0, 4.0], 4)


class Judged(Mse):
    """Gives these values, one after another, whatever it measures."""

    names, told, better = ("told",), [], None

    def __init__(self):
        super().__init__()
        self.left, self.greater_is_better = list(self.told), self.better

    def compute(self, distributed):
        return {"told": self.left.pop(0)}


class JudgedPoints(Points):
    def metrics(self, detailed=False):
        return [Mse(), Judged()]


@pytest.mark.parametrize(
    ("better", "values"),
    [(False, [1.0, 0.95, 0.89, 0.85, 0.88]), (True, [1.0, 1.05, 1.11, 1.15, 1.12]),
     (True, [-1.0, -0.95, -0.89, -0.85, -0.88])],
)  # fmt: skip
def test_the_best_is_the_smallest_or_largest_and_patience_counts_what_is_not_better_by_min_delta(
    monkeypatch, trained, better, values
):
    """Of these only the third is better by a tenth than the one that counted before."""
    settings = {"data": {"_target_": f"{__name__}.JudgedPoints"}, "metric": "told", "sanity_check": False,
                "max_epochs": 5, "min_delta": 0.1, "checkpoint": {"every_epochs": 2, "keep_last": 2}}  # fmt: skip
    monkeypatch.setattr(Judged, "better", better)
    monkeypatch.setattr(Judged, "told", [*values, *values])
    result, *_, session = trained(**settings, patience=3)
    assert (result["epochs"], result["best_epoch"], result["validation"]["told"]) == (5, 4, values[3])
    assert result["greater_is_better"] is better
    files = sorted(path.name for path in session.folder.checkpoints.iterdir())
    assert files == ["best.pth", "step_00000008.pth", "step_00000010.pth"]  # of the epochs 2, 4 and the last, two
    assert trained(**settings, patience=1, overwrite=True)[0]["epochs"] == 2
    result = trained(**{**settings, "max_epochs": 9}, patience=2, overwrite=True)[0]
    assert (result["epochs"], result["best_epoch"], result["selected_by"]["value"]) == (5, 4, values[3])
    monkeypatch.setattr(Judged, "told", values[4:])
    for step in (8, 10):  # the last of which was stopped
        result = trained(**{**settings, "max_epochs": 9}, patience=2,
                         resume=str(session.folder.checkpoints / f"step_{step:08d}.pth"))[0]  # fmt: skip
        assert (result["epochs"], result["tested_epoch"], result["validation"]["told"]) == (5, 4, values[3])
