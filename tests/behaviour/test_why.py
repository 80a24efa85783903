"""task=why: what differs between two runs is named, the planted cause first, and the step from which losses part."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from tests.behaviour.conftest import first_line, ran

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, lookback=24, horizon=12):
        super().__init__()
        self.first, self.second = nn.Linear(lookback, 16), nn.Linear(16, horizon)

    def forward(self, x):
        return self.second(self.first(x.transpose(1, 2)).relu()).transpose(1, 2)
"""
RUN = [
    "data=csv", "data.root=data", "data.file=load.csv", "data.name=load", "data.channels=1", "data.lookback=24",
    "data.horizon=12", "model=plain", "plugins=[my_net]", "model.module._target_=my_net.Net",
    "model.loss._target_=torch.nn.MSELoss", "backend=cpu", "global_batch_size=32", "max_epochs=null",
    "max_steps=6", "log_every=3", "plots=false", "seed=1",
]  # fmt: skip


@pytest.fixture
def setting(exp):
    (exp.folder / "my_net.py").write_text(NET)
    lines = [
        f"2024-01-{1 + hour // 24:02d} {hour % 24:02d}:00,{math.sin(hour / 4) + hour % 7 / 9:.4f}"
        for hour in range(480)
    ]
    (exp.folder / "data").mkdir()
    (exp.folder / "data" / "load.csv").write_text("\n".join(["date,load", *lines]) + "\n")
    ran(exp, *RUN, "output_dir=base")
    return exp


def why(exp, *paths):
    return json.loads(ran(exp, "task=why", f"run=[{','.join(paths)}]", "task.format=json").stdout)


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_planted_differences_are_named_first(setting):
    """A key, a row of the data, a version, a seed, another world size, a changed line of the model."""
    exp = setting
    table, module = exp.folder / "data" / "load.csv", exp.folder / "my_net.py"
    ran(exp, *RUN, "output_dir=key", "optim.lr=0.01")
    ran(exp, *RUN, "output_dir=seed", "seed=2")
    ran(exp, *RUN, "output_dir=two", "nproc=2")
    change(table, "2024-01-02 00:00,", "2024-01-02 00:00,1")
    ran(exp, *RUN, "output_dir=row")
    change(table, "2024-01-02 00:00,1", "2024-01-02 00:00,")
    change(module, ".relu()", ".tanh()")
    ran(exp, *RUN, "output_dir=line", "log_every=1")
    change(module, ".tanh()", ".relu()")
    shutil.copytree(str(exp.path("base")), str(exp.path("version")))
    change(exp.path("version") / "inputs.json", json.dumps(np.__version__), '"1.0.0"')

    found = {name: why(exp, "base", name) for name in ("key", "row", "version", "seed", "two", "line")}
    firsts = {name: about["causes"][0] for name, about in found.items()}
    assert {name: (first["kind"], first["name"].split(" ")[0]) for name, first in firsts.items()} == {
        "key": ("key", "optim.lr"), "row": ("data", "load.csv"), "version": ("environment", "numpy"),
        "seed": ("seed", "seed"), "two": ("key", "nproc"), "line": ("key", "log_every"),
    }  # fmt: skip
    assert (firsts["key"]["first"], firsts["key"]["second"]) == ("0.0005", "0.01")
    assert firsts["version"]["second"] == "1.0.0"
    assert found["version"]["errors"] == [None, "inputs.json was changed or deleted after the run"]
    code = found["line"]["causes"][1]
    assert (code["kind"], code["name"].split(" ")[0]) == ("code", "my_net")
    assert [line[0] for line in code["lines"]] == ["-", "+"]
    assert [len(about["causes"]) for name, about in found.items() if name != "two"] == [1, 1, 1, 1, 2]

    losses = {name: about["losses"] for name, about in found.items()}
    steps = {name: (part["step"], part["steps"]) for name, part in losses.items() if name != "two"}
    assert steps == {"key": (2, 6), "row": (1, 6), "version": (None, 6), "seed": (1, 6), "line": (1, 6)}
    assert losses["two"]["relative"] < losses["two"]["allowed"] < losses["seed"]["relative"]
    assert found["seed"]["commands"][0].endswith("seed=1")
    assert "one seed cannot tell" in found["seed"]["noise"][0]
    assert "test samples" in found["seed"]["noise"][0]

    screen = ran(exp, "task=why", "run=[base,line]").stdout
    assert ".tanh()" in screen
    assert len(screen.splitlines()) < 24
    checkpoints = [f"{run}/checkpoints/step_00000006.pth" for run in ("base", "seed")]
    assert "4 of 4 tensors differ at step 6, first network.first:" in why(exp, *checkpoints)["weights"]
    assert "compares two runs" in first_line(ran(exp, "task=why", "run=base", code=2))
    assert "task.format" in first_line(ran(exp, "task=why", "run=[base,key]", "task.format=xml", code=2))
