"""``model=plain``: a torch module of anybody's and a loss train, without a class or a file of exp's in their code."""

from __future__ import annotations

import json

import pytest
import torch

from tests.behaviour.conftest import first_line, losses, ran

NET = """
import torch
from torch import nn


class DLinear(nn.Module):
    def __init__(self, horizon, lookback=96, window=25):
        super().__init__()
        self.average = nn.AvgPool1d(window, 1, window // 2, count_include_pad=False)
        self.trend, self.rest = nn.Linear(lookback, horizon), nn.Linear(lookback, horizon)

    def forward(self, x):
        x = x.transpose(1, 2)
        trend = self.average(x)
        return (self.trend(trend) + self.rest(x - trend)).transpose(1, 2)


def worst_series(output, target, power=1.0):
    return ((output - target).abs() ** power).mean(dim=1).amax(dim=1).mean()

"""
DATA = [
    "data=etth1", "model=plain", "plugins=[my_net]", "backend=cpu", "data.lookback=96", "global_batch_size=32",
    "max_epochs=1", "max_steps=4", "log_every=1", "plots=false",
]  # fmt: skip
PLAIN = [*DATA, "model.module._target_=my_net.DLinear", "+model.module.horizon=96"]
L1 = "model.loss._target_=torch.nn.L1Loss"


@pytest.fixture
def net(exp):
    (exp.folder / "my_net.py").write_text(NET)
    return exp


def test_a_module_and_a_loss_train_alike_on_one_rank_and_two_and_are_evaluated_and_predicted(net):
    assert ran(net, *PLAIN, L1, "output_dir=one").stdout.startswith(
        "timebridge_small data=etth1 model=plain: train on "
    )
    ran(net, *PLAIN, L1, "output_dir=two", "nproc=2")
    assert losses(net.path("two")) == pytest.approx(losses(net.path("one")), rel=1e-4)
    assert net.result("one")["warnings"] == []
    ran(net, "task=eval", "plugins=[my_net]", "init_from=one", "output_dir=tested")
    assert net.result("tested")["metrics"]["mse"] == pytest.approx(net.result("one")["metrics"]["mse"], rel=1e-6)
    assert first_line(net("task=eval", "init_from=one", "output_dir=not")).count("plugins=[my_net]") == 1
    ran(net, "task=predict", "plugins=[my_net]", "init_from=one", "output_dir=said")
    assert net.result("said")["files"]

    (file,) = net.path("one/checkpoints").glob("best*.pth")
    own = {key.replace("network.", ""): value for key, value in torch.load(str(file))["state_dict"].items()}
    assert sorted(own) == ["rest.bias", "rest.weight", "trend.bias", "trend.weight"]
    torch.save(own, str(net.path("own.pth")))
    ran(net, *PLAIN, L1, "init_from=own.pth", "output_dir=further")


def test_a_trained_module_is_exported_as_a_program_of_its_own(net):
    ran(net, *PLAIN, L1, "output_dir=run")
    command = ("task=export", "plugins=[my_net]", "init_from=run", "backend=cpu")
    done = net(*command, "output_dir=out")
    assert done.returncode == 0, done.stderr
    about = json.loads((net.path("out") / "export" / "export.json").read_text())
    assert about["inputs"]["x"]["shape"] == ["B", 96, 7]
    assert set(about["skipped"]) >= {"huggingface"}
    assert "write_huggingface" in about["skipped"]["huggingface"]
    assert about["skipped"]["huggingface"] in done.stdout + done.stderr
    ran(net, *command, "task.formats=[torchscript]", "output_dir=traced")
    program = torch.jit.load(str(net.path("traced") / "export" / "model.torchscript.pt"))
    checkpoint = torch.load(str(net.path("run") / "checkpoints" / "best.pth"))
    state, (mean, std) = checkpoint["state_dict"], (torch.tensor(checkpoint["data"][key]) for key in ("mean", "std"))
    x = torch.randn(5, 96, 7) * 9.0  # in units of the file
    rows = ((x - mean) / std).transpose(1, 2)
    trend = torch.nn.functional.avg_pool1d(rows, 25, 1, 12, count_include_pad=False)
    parts = [(trend, "trend"), (rows - trend, "rest")]
    expected = sum(v @ state[f"network.{n}.weight"].T + state[f"network.{n}.bias"] for v, n in parts).transpose(1, 2)
    torch.testing.assert_close(program(x=x), (expected * std + mean).float(), rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception, match=r"export\.json"):
        program(torch.zeros(5, 95, 7))
    for setting, word in (("task.formats=[huggingface]", "write_huggingface"), ("task.size=32", "task.size")):
        assert word in first_line(net(*command, setting, "output_dir=refused"))


def test_losses_and_inputs_are_chosen_on_the_command_line(net):
    """Their numbers: tests/models/test_plain.py."""
    own = ["model.loss._target_=my_net.worst_series", "+model.loss.power=2.0", "model.inputs={x: x}", "model.target=y"]
    ran(net, *PLAIN, *own, "output_dir=run")
    assert net.result("run")["steps"] == 4


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["model.module.horizon=48", L1], ("L1Loss", "my_net.DLinear", "(128, 96, 7)", "(128, 48, 7)")),
        (["model.loss._target_=os.path.join"], ("model.loss._target_", "plugins")),
        ([L1, "+model.module.horizont=1"], ("model.module.horizont", "'model.module.horizon'")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_in_one_line_before_the_first_step(net, words, named):
    done = net(*PLAIN, *words, "output_dir=run")
    assert done.returncode == 2, done.stdout + done.stderr
    line = first_line(done)
    assert [text for text in named if text not in line] == [], line
    assert not net.path("run/checkpoints").exists()


IMAGES = """
import torch
from torch import nn


class Pixels(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, num_classes, 3, padding=1))

    def forward(self, image):
        return {"logits": self.layers(image), "aux": None}
"""


def test_images_with_classes_of_the_data(exp):
    (exp.folder / "my_net.py").write_text(IMAGES)
    words = [
        "experiment=plain", "data=dubai", "plugins=[my_net]", "backend=cpu", "data.size=64", "plots=false",
        "global_batch_size=4", "max_steps=2", "val_every=2", "log_every=1", "debug.eval_batches=1",
        "data.num_workers=0", "model.module._target_=my_net.Pixels", "model.output=logits",
        "model.predict=argmax",
    ]  # fmt: skip
    ran(exp, *words, "model.loss._target_=torch.nn.CrossEntropyLoss", "output_dir=run")
    assert "miou" in json.dumps(exp.result("run")["metrics"]).lower()
    line = first_line(exp(*words, "model.output=out", "model.loss._target_=torch.nn.CrossEntropyLoss"))
    assert [text for text in ("model.output=out", "my_net.Pixels", "logits") if text not in line] == []


@pytest.mark.extended
def test_parity_operators_and_estimate_work_with_it(net):
    ran(net, *PLAIN, L1, "task=parity", "reference=cpu", "steps=2", "output_dir=parity")
    ran(net, *PLAIN, L1, "task=estimate", "output_dir=estimate")
    assert net.result("estimate")["estimate"]["parameters"] == 2 * (96 * 96 + 96)
    cards = [word for word in PLAIN if word != "backend=cpu"]
    ran(net, *cards, L1, "task=operators", "backend=gcu", "backend.simulate=true", "output_dir=operators")
