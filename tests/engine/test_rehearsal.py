"""What is wrong with a model, data or a metric of the user's own is one line before the first step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from exp.backends.cpu import CpuBackend
from omegaconf import OmegaConf
from torch.utils.data import Dataset

from exp.config.schema import ExpConfig
from exp.data.base import Data, split_of
from exp.engine.building import build_data, build_model, fingerprint_of
from exp.engine.distributed import Distributed
from exp.engine.rehearsal import explain_first_step, explain_unused, rehearse
from exp.errors import ConfigError
from exp.launcher.rank import RankInfo
from exp.metrics import SampleMetric
from exp.models.base import Model
from exp.runfolder import RunFolder
from exp.session import Session
from exp.tasks.train import Train


class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return {"x": torch.tensor(float(number)), "y": 2.0 * number}


class Numbers(Data):
    eval_batch_size = 4

    def __init__(self):
        self.train = self.val = self.test = Samples()

    def metrics(self, detailed=False):
        return Distance()


class Distance(SampleMetric):
    names = ("distance",)
    greater_is_better = False

    def per_sample(self, outputs, batch):
        return (outputs - batch["y"]).abs()


class Line(Model):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
        self.norm = torch.nn.BatchNorm1d(1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, y, mode):
        self.calls += 1
        torch.rand(1), random.random(), np.random.rand()
        outputs = self.w * x
        return {"loss": (outputs - y).square().mean()} if mode == "loss" else outputs


def made(members: dict[str, Any], base: type) -> type:
    return type(f"Own{base.__name__}", (base,), {"__module__": __name__, **members})


def session_of(monkeypatch, tmp_path, data=Numbers, model=Line, rank=0, world_size=1) -> Session:
    """A session whose configuration names these two classes."""
    monkeypatch.setitem(globals(), "OwnData", data)
    monkeypatch.setitem(globals(), "OwnModel", model)
    config = OmegaConf.structured(ExpConfig)
    config.name, config.task, config.batch_size = "own", OmegaConf.structured(Train), 4
    config.data, config.model = {"_target_": f"{__name__}.OwnData"}, {"_target_": f"{__name__}.OwnModel"}
    info = RankInfo(rank=rank, world_size=world_size)
    session = Session(config, RunFolder(tmp_path), info, CpuBackend(name="cpu"))
    session.device, session.distributed = torch.device("cpu"), Distributed()
    return session


def begin(session: Session) -> None:
    """What a training does before its first step, and where that fails."""
    data = build_data(session)
    fingerprint_of(data)
    model = build_model(session, data)
    rehearse(session, data, model)
    explain_first_step(session, data, model)


DATA = [
    ("adopt", None, {"state": lambda self: {"mean": 1}}, "has state(), and no adopt(state) that takes it"),
    ("adopt", lambda self, state: state["std"], {"state": lambda self: {"mean": 1}}, ".adopt(state()) raises KeyError"),
    ("state", lambda self: [1], {"adopt": print}, ".state must give a dict of numbers, text, lists, dicts and tensors"),
    ("state", lambda self: {"a": {1}}, {"adopt": print}, "a builtins.set cannot go into a checkpoint"),
    ("notes", "careful", {}, ".notes must be a list of lines, not 'careful'"),
    ("fingerprint", lambda self: {"file": 3}, {}, ".fingerprint must give {name: [files, bytes, digest]}"),
    ("model_arguments", lambda self: None, {}, ".model_arguments must give a dict of arguments by name, not None"),
    ("metrics", lambda self: Distance(), {}, ".metrics(detailed=False) raises TypeError"),
    ("metrics", lambda self, detailed: [], {}, ".metrics gives [], not a metric or a list of some"),
    ("metrics", lambda self, detailed: Distance, {}, "Distance is a class; give an object of it"),
    ("record", lambda self: {}, {}, ".record(gather) raises TypeError"),
    ("record", lambda self, gather: {"a": torch.ones(1)}, {}, ".record must give a dict for result.json: Object of"),
    ("collate", lambda self, samples: samples, {}, "a batch must be a dict by the names that the model's"),
    ("collate", lambda self, samples: {1: 2}, {}, "with the keys [1]"),
    ("collate", lambda self, samples: 1 / 0, {}, ".val[...] raises ZeroDivisionError: division by zero (test_"),
]  # fmt: skip
MODEL = [
    ("forward", lambda self, x, y: x, "forward(x, y, mode='predict') raises TypeError"),
    ("forward", lambda self, x, mode: x, "forward(x, y, mode='predict') raises TypeError"),
    ("forward", lambda self, x, y, mode: None, "forward(x, y, mode='predict') gives None, not a prediction for each"),
    ("forward", lambda self, x, y, mode: x.mean(), "gives one number for all samples, not a prediction for each"),
    ("forward", lambda self, x, y, mode: x, "mode='loss') must give a dict of 0-dim tensors such as"),
    ("forward", lambda self, x, y, mode: x if mode != "loss" else {"mse": x.sum()}, "no name that contains 'loss'"),
    ("forward", lambda self, x, y, mode: x if mode != "loss" else {"loss": x.sum(), "lr": x.sum()}, "gives lr, as met"),
    ("forward", lambda self, x, y, mode: x if mode != "loss" else {"loss": x}, "a tensor of shape (4,) as loss: take"),
    ("forward", lambda self, x, y, mode: x if mode != "loss" else {"loss": 1.0}, "gives a float as loss"),
    ("forward", lambda self, x, y, mode: x if mode != "loss" else {"loss": x.sum()}, "no gradient leads back from"),
    ("__init__", lambda self: setattr(self, "w", torch.nn.Linear(1, 1)), "before Module.__init__() call (test_"),
]  # fmt: skip
METRIC = [
    ("per_sample", lambda self, outputs, batch: outputs.mean(), ".per_sample must give a tensor (B,), a figure"),
    ("per_sample", lambda self, outputs, batch: outputs[:3], ".per_sample gives 3 figures for 4 samples"),
    ("per_sample", lambda self, outputs, batch: batch["z"], ".update(outputs, batch) raises KeyError: 'z' (test_"),
    ("compute", lambda self: {"distance": 1.0}, ".compute(distributed) raises TypeError"),
    ("compute", lambda self, distributed: 1.0, ".compute must give a dict of figures by name, not float"),
    ("compute", lambda self, distributed: {"far": 1.0}, ".compute gives ['far'], but its names are ['distance']"),
    ("compute", lambda self, distributed: {"distance": "1"}, ".compute must give a number for distance, not str"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("base", "member", "value", "more", "says"),
    [(Numbers, *case) for case in DATA]
    + [(Line, member, value, {}, says) for member, value, says in MODEL]
    + [(Distance, member, value, {}, says) for member, value, says in METRIC],
)
def test_one_line_says_member_class_and_page(monkeypatch, tmp_path, base, member, value, more, says):
    own = made({**more, **({} if value is None else {member: value})}, base)
    if base is Distance:
        session = session_of(monkeypatch, tmp_path, made({"metrics": lambda self, detailed: own()}, Numbers))
    else:
        session = session_of(monkeypatch, tmp_path, **{"data" if base is Numbers else "model": own})
    with pytest.raises(ConfigError) as told:
        begin(session)
    (line,) = str(told.value).splitlines()
    assert says in line
    assert "see docs/add-an-experiment.md" in line
    assert __name__ in line


def test_what_is_no_model_or_an_empty_split(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"OwnModel.* is no subclass of exp.models.base.Model|Linear is no subclass"):
        begin(session_of(monkeypatch, tmp_path, model=lambda: torch.nn.Linear(1, 1)))
    data = Numbers()
    data.val = []
    with pytest.raises(ConfigError, match=r"Numbers\.val \(list\) has no sample"):
        split_of(data, "val", 0)


def test_a_bad_test_split_shows_before_the_training(monkeypatch, tmp_path):
    class Untold(Samples):
        def __getitem__(self, number):
            return {**super().__getitem__(number), "y": "?"}

    def split(self):
        Numbers.__init__(self)
        self.test = Untold()

    with pytest.raises(ConfigError, match=r"update\(outputs, batch\) raises TypeError: .+ \(test_rehearsal.py, line"):
        begin(session_of(monkeypatch, tmp_path, made({"__init__": split}, Numbers)))
    broken = made({"__getitem__": lambda self, number: 1 / 0}, Samples)
    split_broken = made({"__init__": lambda self: (split(self), setattr(self, "test", broken()))[0]}, Numbers)
    with pytest.raises(ConfigError, match=r"OwnNumbers\.test\[0\] raises ZeroDivisionError: .+ \(test_rehearsal"):
        begin(session_of(monkeypatch, tmp_path, split_broken))


def test_nothing_of_it_stays(monkeypatch, tmp_path):
    session = session_of(monkeypatch, tmp_path)
    data = build_data(session)
    model = build_model(session, data)
    model.norm.eval()  # frozen by its owner, in a model that trains
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
    rehearse(session, data, model)
    after = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]
    assert (model.training, model.norm.training, float(model.calls)) == (True, False, 0.0)
    # A rank without a sample takes part all the same; switched off, or with exp's own classes alone, nobody does.
    rehearse(session_of(monkeypatch, tmp_path, rank=8, world_size=9), data, model)
    broken = made({"forward": None}, Line)()
    session.config.rehearsal = False
    rehearse(session, data, broken)
    session.config.rehearsal = True
    for cls in (Line, Distance, Numbers, type(broken)):
        monkeypatch.setattr(cls, "__module__", "exp.own")
    rehearse(session, data, broken)


def test_few_samples_may_have_no_figure_yet(monkeypatch, tmp_path):
    said = []
    for value in (lambda self, outputs, batch: outputs * float("nan"), None):
        members = (
            {"compute": lambda self, distributed: {"distance": float("nan")}}
            if value is None
            else {"per_sample": value}
        )
        own = made(members, Distance)
        session = session_of(monkeypatch, tmp_path, made({"metrics": lambda self, detailed, own=own: own()}, Numbers))
        monkeypatch.setattr(session, "say", said.append)
        begin(session)
    assert "no sample that distance could be measured on" in said[0]
    assert "distance of the first validation batch is nan before any training" in said[1]


def test_parameters_without_a_gradient_are_named(monkeypatch, tmp_path):
    session = session_of(monkeypatch, tmp_path)
    data = build_data(session)
    error = explain_unused(session, data, build_model(session, data))
    assert "Line depends on norm.weight, norm.bias, and the ranks wait" in str(error)
