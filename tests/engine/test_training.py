"""What is wrong with a model, data or a metric of the user's own ends the run before the first step."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exp.data.base import Data
from exp.engine.build import build_data, build_evaluator, build_model, eval_split
from exp.engine.loops import EvalLoop
from exp.engine.train import _check_one_batch
from exp.errors import ConfigError
from tests.engine.conftest import Line, Mse, Samples


class Numbers(Data):
    eval_batch_size = 4

    def __init__(self):
        self.train, self.val, self.test = Samples(), Samples(), Samples()

    def metrics(self, detailed=False):
        return Mse()


class Restless(Line):
    """Draws random numbers in each pass; its batch norm is in none."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)

    def forward(self, x, y, mode="loss"):
        torch.rand(1), random.random(), np.random.rand()
        return super().forward(x, y, mode)


OWN = {"data": {"_target_": f"{__name__}.Numbers"}, "model": {"_target_": f"{__name__}.Restless"}, "batch_size": 4}


def check(session, data, model):
    """What a training does before its first step."""
    loader = eval_split(session, data, "val")
    loop = EvalLoop(session, model, loader, build_evaluator(session, data), "val")
    _check_one_batch(data, SimpleNamespace(session=session, backend=session.backend, model=model, val_loop=loop))


@pytest.mark.parametrize(
    ("base", "members", "error", "named"),
    [
        (Numbers, {"state_dict": lambda self: {"a": {1}}}, TypeError, "data.a"),
        (Numbers, {"val": None, "__init__": lambda self: None}, ConfigError, "val"),
        (Numbers, {"collate": lambda self, samples: samples}, ConfigError, "batch"),
        (Restless, {"forward": lambda self, x, y: x}, TypeError, "mode"),
        (Restless, {"forward": lambda self, x, y, mode: x if mode != "loss" else {"loss": x}}, ConfigError, r"\(4,\)"),
        (Restless, {"forward": lambda self, x, y, mode: x}, ConfigError, "Tensor"),
        (Restless, {"forward": lambda self, x, y, mode: x if mode != "loss" else {"loss": 1.5}}, ConfigError, "float"),
        (Restless, {"forward": lambda self, x, y, mode: x if mode != "loss" else {"loss": [x]}}, ConfigError, "list"),
        (Mse, {"per_sample": lambda self, outputs, batch: outputs.mean()}, ConfigError, "per_sample"),
    ],
)
def test_it_is_told_before_the_first_step(monkeypatch, make_session, base, members, error, named):
    for member, value in members.items():
        monkeypatch.setattr(base, member, value, raising=False)
    session = make_session(**OWN)

    def begin():
        data = build_data(session)
        model = build_model(session, data)
        check(session, data, model)
        model.parse_losses(model(**Samples()[torch.arange(4)], mode="loss"))

    with pytest.raises(error, match=named):
        begin()


def test_random_states_stay(make_session):
    def states():
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]

    session = make_session(**OWN)
    data = build_data(session)
    model = build_model(session, data)
    before = states()
    check(session, data, model)
    assert states() == before
