"""What is wrong with a model, data or a metric of the user's own is one line before the first step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from exp.data.base import Data
from exp.engine.building import build_data, build_model, fingerprint_of
from exp.engine.rehearsal import explain_first_step, explain_unused, rehearse
from exp.errors import ConfigError
from tests.engine.conftest import Line, Mse, Samples


class Strings(Samples):
    def __getitem__(self, number):
        return {**super().__getitem__(number), "y": "?"}


class Numbers(Data):
    eval_batch_size = 4
    tested = Samples

    def __init__(self):
        self.train, self.val, self.test = Samples(), Samples(), self.tested()

    def metrics(self, detailed=False):
        return Mse()


class Restless(Line):
    """Changes a buffer and draws random numbers in each pass; its batch norm is in none."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)

    def forward(self, x, y, mode="loss"):
        self.norm.running_mean += 1
        torch.rand(1), random.random(), np.random.rand()
        return super().forward(x, y, mode)


OWN = {"data": {"_target_": f"{__name__}.Numbers"}, "model": {"_target_": f"{__name__}.Restless"}, "batch_size": 4}


def begin(session):
    """What a training does before its first step, and where that fails."""
    data = build_data(session)
    fingerprint_of(data)
    model = build_model(session, data)
    rehearse(session, data, model)
    explain_first_step(session, data, model)


@pytest.mark.parametrize(
    ("base", "members", "named"),
    [
        (Numbers, {"state": lambda self: {"mean": 1}, "adopt": None}, "adopt"),
        (Numbers, {"state": lambda self: {"a": {1}}, "adopt": print}, "state"),
        (Numbers, {"fingerprint": lambda self: {"file": 3}}, "fingerprint"),
        (Numbers, {"metrics": lambda self, detailed: []}, "metrics"),
        (Numbers, {"record": lambda self, gather: {"a": torch.ones(1)}}, "record"),
        (Numbers, {"collate": lambda self, samples: samples}, "batch"),
        (Numbers, {"tested": Strings}, "update(outputs, batch) raises TypeError: "),
        (Numbers, {"tested": lambda self: [None, {}]}, ".test[...]"),
        (Restless, {"forward": lambda self, x, y: x}, "mode='predict'"),
        (Restless, {"forward": lambda self, x, y, mode: x.mean()}, "mode='predict'"),
        (Restless, {"forward": lambda self, x, y, mode: x if mode != "loss" else {"loss": x}}, "(4,)"),
        (Restless, {"forward": lambda self, x, y, mode: x if mode != "loss" else {"loss": x.sum()}}, "gradient"),
        (Mse, {"per_sample": lambda self, outputs, batch: outputs[:3]}, "per_sample"),
        (Mse, {"compute": lambda self, distributed: {"far": 1.0}}, "far"),
    ],
)
def test_one_line_says_class_member_and_page(monkeypatch, make_session, base, members, named):
    """More of them: tests/behaviour/test_own_code.py."""
    for member, value in members.items():
        monkeypatch.setattr(base, member, value, raising=False)
    with pytest.raises(ConfigError) as told:
        begin(make_session(**OWN))
    (line,) = str(told.value).splitlines()
    assert named in line
    assert "docs/add-an-experiment.md" in line


def test_nothing_of_it_stays(make_session):
    def states():
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]

    session = make_session(**OWN)
    data = build_data(session)
    model = build_model(session, data)
    model.norm.eval()  # frozen by its owner, in a model that trains
    before = states()
    rehearse(session, data, model)
    assert states() == before
    assert (model.training, model.norm.training, model.norm.running_mean.item()) == (True, False, 0.0)
    # A rank without a sample takes part all the same; switched off, nobody does.
    rehearse(make_session(rank=64, world_size=65, **OWN), data, model)
    session.config.rehearsal = False
    rehearse(session, data, type("Own", (Line,), {"forward": None})())


def test_parameters_without_a_gradient_are_named(make_session):
    session = make_session(**OWN)
    data = build_data(session)
    error = explain_unused(session, data, build_model(session, data))
    assert "norm.weight, norm.bias" in str(error)
