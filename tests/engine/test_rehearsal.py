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
from exp.data.base import Data
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


CASES = [
    (Numbers, "adopt", None, {"state": lambda self: {"mean": 1}}, "adopt"),
    (Numbers, "state", lambda self: {"a": {1}}, {"adopt": print}, "state"),
    (Numbers, "fingerprint", lambda self: {"file": 3}, {}, "fingerprint"),
    (Numbers, "metrics", lambda self, detailed: [], {}, "metrics"),
    (Numbers, "record", lambda self, gather: {"a": torch.ones(1)}, {}, "record"),
    (Numbers, "collate", lambda self, samples: samples, {}, "batch"),
    (Line, "forward", lambda self, x, y: x, {}, "mode='predict'"),
    (Line, "forward", lambda self, x, y, mode: x.mean(), {}, "mode='predict'"),
    (Line, "forward", lambda self, x, y, mode: x if mode != "loss" else {"mse": x.sum()}, {}, "'loss'"),
    (Line, "forward", lambda self, x, y, mode: x if mode != "loss" else {"loss": x}, {}, "(4,)"),
    (Line, "forward", lambda self, x, y, mode: x if mode != "loss" else {"loss": x.sum()}, {}, "gradient"),
    (Distance, "per_sample", lambda self, outputs, batch: outputs[:3], {}, "per_sample"),
    (Distance, "per_sample", lambda self, outputs, batch: batch["z"], {}, "KeyError: 'z' (test_"),
    (Distance, "compute", lambda self, distributed: {"far": 1.0}, {}, "far"),
]


@pytest.mark.parametrize(("base", "member", "value", "more", "named"), CASES)
def test_one_line_says_class_member_and_page(monkeypatch, tmp_path, base, member, value, more, named):
    own = made({**more, **({} if value is None else {member: value})}, base)
    if base is Distance:
        session = session_of(monkeypatch, tmp_path, made({"metrics": lambda self, detailed: own()}, Numbers))
    else:
        session = session_of(monkeypatch, tmp_path, **{"data" if base is Numbers else "model": own})
    with pytest.raises(ConfigError) as told:
        begin(session)
    (line,) = str(told.value).splitlines()
    assert named in line
    assert "docs/add-an-experiment.md" in line
    assert own.__name__ in line or member == "collate"  # which all samples go through


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
    # A rank without a sample takes part all the same; switched off, nobody does.
    rehearse(session_of(monkeypatch, tmp_path, rank=8, world_size=9), data, model)
    session.config.rehearsal = False
    rehearse(session, data, made({"forward": None}, Line)())


def test_parameters_without_a_gradient_are_named(monkeypatch, tmp_path):
    session = session_of(monkeypatch, tmp_path)
    data = build_data(session)
    error = explain_unused(session, data, build_model(session, data))
    assert "Line depends on norm.weight, norm.bias, and the ranks wait" in str(error)
