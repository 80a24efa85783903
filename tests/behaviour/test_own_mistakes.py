"""Models, data and metrics of the user's own: what is wrong with them is said at once, and by name."""

from __future__ import annotations

import pytest

from tests.behaviour.conftest import FORECAST, result

MINE = """
import torch
from exp.metrics import SampleMetric
from exp.models.base import Model


class Broadcast(Model):
    def __init__(self, lookback, horizon, channels, **_):
        super().__init__()
        self.layer = torch.nn.Linear(lookback, horizon)

    def forward(self, x, y=None, mode="tensor", **_):
        outputs = self.layer(x.transpose(1, 2)).transpose(1, 2)
        if mode == "loss":
            return {"loss": torch.nn.functional.mse_loss(outputs[:, :1, 0], y[:, 0, 0])}
        return outputs


class Accuracy(SampleMetric):
    names = ("accuracy",)

    def per_sample(self, outputs, batch):
        return (outputs - batch["y"]).abs().mean((1, 2)).neg().exp()
"""


def test_a_loss_of_shapes_that_do_not_fit_ends_the_run_in_its_first_batch(exp):
    (exp.folder / "mine.py").write_text(MINE)
    done = exp(*FORECAST, "model._target_=mine.Broadcast", "log_every=1", "output_dir=run")
    assert done.returncode == 1, done.stdout
    first = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    told = result(exp.path("run"))
    for said in (first, told["error"]["message"]):
        assert "mine.Broadcast.forward" in said
        assert "target size" in said
        assert f"mine.py, line {MINE[: MINE.index('mse_loss')].count(chr(10)) + 1}" in said
    assert told["steps"] == 0


SHAPES = """
import torch
from exp.metrics import SampleMetric
from exp.models.base import Model


class Unequal(Model):
    rows = 48

    def __init__(self, lookback, horizon, channels, **_):
        super().__init__()
        self.layer = torch.nn.Linear(lookback, self.rows)

    def forward(self, x, y=None, mode="tensor", **_):
        outputs = self.layer(x.transpose(1, 2)).transpose(1, 2)
        return {"loss": (outputs - y).square().mean()} if mode == "loss" else self.predicted(x, outputs)

    def predicted(self, x, outputs):
        return x


class Flat(Unequal):
    rows = 1  # torch would broadcast it

    def predicted(self, x, outputs):
        return outputs


class Modeless(Unequal):
    def forward(self, x, y):
        return x


class Error(SampleMetric):
    names = ("error",)
    greater_is_better = False

    def per_sample(self, outputs, batch):
        return (outputs - batch["y"][:, :7]).abs().mean((1, 2))
"""


@pytest.mark.parametrize(("name", "more", "parts"), [
    ("Flat", [], ["mine.Flat.forward", "(32, 96, 7)", "(32, 1, 7)"]),
    ("Unequal", [], ["mine.Unequal.forward", "outputs (32, 48, 7)", "y (32, 96, 7)", "mine.py, line 16"]),
    ("Modeless", [], ["mine.Modeless.forward", "mode='tensor'", "add-an-experiment.md"]),
    ("Unequal", ["metrics=[{_target_: mine.Error}]"], ["mine.Unequal.forward", "mine.Error.per_sample", "(32, 96, 7)"]),
])  # fmt: skip
def test_a_wrong_shape_is_told_with_class_member_and_both_shapes(exp, name, more, parts):
    (exp.folder / "mine.py").write_text(SHAPES)
    done = exp(*FORECAST, f"model._target_=mine.{name}", "data.eval_batch_size=32", "output_dir=run", *more)
    assert done.returncode in (1, 2), done.stdout
    first = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert all(part in first for part in parts), first


def test_a_metric_says_which_way_it_goes(exp):
    (exp.folder / "mine.py").write_text(MINE)
    chosen = ["metrics=[{_target_: mine.Accuracy}]", "metric=accuracy", "output_dir=run"]
    done = exp(*FORECAST, *chosen)
    assert done.returncode == 2, done.stdout
    assert "mine.Accuracy.greater_is_better" in done.stderr.splitlines()[0]
    text = MINE.replace('names = ("accuracy",)', 'names = ("accuracy",)\n    greater_is_better = True')
    (exp.folder / "mine.py").write_text(text)
    assert exp(*FORECAST, *chosen).returncode == 0
    told = result(exp.path("run"))
    assert told["metric_name"] == "accuracy"
    assert told["greater_is_better"] is True


TABLES = """
import numpy as np
import torch
from exp.metrics import Metric, Table


class Counted(Metric):
    names = ("counted",)
    greater_is_better = True
    table = "per/kind"
    column = np.array([1234567, 3])

    def reset(self):
        self.samples = 0

    def update(self, outputs, batch):
        self.samples += len(outputs)

    def compute(self, distributed):
        return {self.names[0]: self.samples}

    def tables(self):
        return [Table(self.table, "kind", np.array([7, 8]), {"count": self.column})]


class Other(Counted):
    names = ("other",)
    column = torch.tensor([1234567.0, 0.25])


class Third(Counted):
    names = ("third",)
    table = "metrics"
    column = [None, "text"]


class Short(Counted):
    names = ("short",)
    table = "short"
    column = [1.0]
"""


def test_a_metric_that_forgets_the_other_ranks_ends_the_run_before_anything_is_decided(exp):
    (exp.folder / "mine.py").write_text(TABLES)
    done = exp(*FORECAST, "nproc=2", "metrics=[{_target_: mine.Counted}]", "data.eval_batch_size=33", "output_dir=run")
    assert done.returncode == 1, done.stdout
    first = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    for said in ("mine.Counted", "counted=", "on rank 0", "on rank 1"):
        assert said in first
    assert not list(exp.path("run").glob("checkpoints/best.pth"))


def test_an_evaluation_writes_every_table_whatever_its_name_and_cells(exp, trained):
    (exp.folder / "mine.py").write_text(TABLES)
    metrics = ",".join(f"{{_target_: mine.{name}}}" for name in ("Counted", "Other", "Third", "Short"))
    done = exp("task=eval", f"init_from={trained('forecast')}", "backend=cpu", f"metrics=[{metrics}]", "output_dir=run")
    assert done.returncode == 0, done.stderr
    files = {path.name: path.read_text() for path in exp.path("run").glob("metrics_*.csv") if "per_c" not in path.name}
    files.pop("metrics_per_step.csv")
    assert files == {
        "metrics_per_kind.csv": "kind,count\n7,1234567\n8,3\n",
        "metrics_per_kind_other.csv": "kind,count\n7,1234567\n8,0.25\n",
        "metrics_metrics_third.csv": "kind,count\n7,\n8,text\n",
    }
    told = result(exp.path("run"))
    assert told["per_kind"] == {"count": {"7": 1234567, "8": 3}}
    assert told["status"] == "completed"
    for said in ("per_kind_other", "metrics_third", "mine.Short is left out"):
        assert said in done.stdout


def test_a_backend_that_raises_before_any_worker_starts_is_named_with_its_line(exp):
    text = (
        "from exp.backends.cpu import CpuBackend\nfrom exp.hardware.backend import Capabilities\n\n\n"
        "class Broken(CpuBackend):\n    capabilities = Capabilities()\n\n"
        "    def device_count(self):\n        return 1 / 0\n"
    )
    (exp.folder / "mine.py").write_text(text)
    done = exp(*FORECAST, "backend._target_=mine.Broken", "output_dir=run")
    assert done.returncode == 1, done.stdout
    first = done.stderr.splitlines()[0]
    for said in ("backend: mine.Broken.device_count", "ZeroDivisionError", "mine.py, line 9"):
        assert said in first, done.stderr
    assert not exp.path("run").exists()
