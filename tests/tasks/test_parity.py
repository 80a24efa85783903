"""task=parity: two backends that agree, and some that do not; and the golden losses."""

from __future__ import annotations

import json
from textwrap import dedent

import pytest

from tests import golden
from tests.conftest import TINY
from tests.simulators import needs_card

NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name != "timebridge_small")) for name in golden.SETTINGS]
SMALL = [*(setting for setting in TINY if setting != "backend=cpu"), "task=parity", "reference=cpu", "output_dir=run"]


@needs_card
@pytest.mark.parametrize("name", NAMES)
def test_golden_losses_on_the_cpu_and_on_a_simulated_card(exp, name):
    done = exp(*golden.command(name, ["backend=gcu", "backend.simulate=true"], "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    expected = pytest.approx(golden.read(name), rel=golden.TOLERANCE)
    for run in ("tested", "reference"):
        assert golden.losses(exp.path("run") / run) == expected, run


@pytest.mark.skipif(not needs_card.args[0], reason="the comparison on a simulated card has the CPU's losses, too")
@pytest.mark.parametrize("name", NAMES)
def test_golden_losses_on_the_cpu(exp, name):
    done = exp(*golden.command(name, ["backend=cpu"], "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert golden.losses(exp.path("run") / "tested") == pytest.approx(golden.read(name), rel=golden.TOLERANCE)


@pytest.mark.slow
def test_two_that_agree_are_reported_with_figures_and_a_picture(exp):
    done = exp(*SMALL, "backend=cpu", "nproc=2", "steps=3")
    assert done.returncode == 0, done.stderr
    assert "dropout is off in both runs: model.attention_dropout was 0.15" in done.stdout
    assert "cpu and cpu agree over 3 steps" in done.stdout
    report = json.loads((exp.path("run") / "parity.json").read_text())
    assert report["agrees"] is True
    assert report["loss_differences"] == [0.0, 0.0, 0.0]
    assert report["losses"]["tested"] == report["losses"]["reference"] == golden.losses(exp.path("run") / "tested")
    assert report["random_modules"] == []
    assert not list(exp.path("run").rglob("trace.npz"))
    assert {kind: found["absolute"] for kind, found in report["largest"].items()} == dict.fromkeys(
        ("output", "loss", "gradient", "parameter", "later", "drift"), 0.0
    )
    assert exp.result("run")["status"] == "completed"
    assert exp.result("run")["metric"] == 0.0
    assert (exp.path("run") / "plots" / "parity.png").read_bytes().startswith(b"\x89PNG")


# What a device may get wrong, in a backend that is the CPU's otherwise.
BROKEN = {
    "forward": """
        def set_device(self, local_rank):
            import torch
            def blur(module, inputs, output):
                return output.bfloat16().float() if isinstance(module, torch.nn.LayerNorm) else None
            torch.nn.modules.module.register_module_forward_hook(blur)
            return super().set_device(local_rank)""",
    "backward": """
        def set_device(self, local_rank):
            import torch
            def shrink(module, inputs, output):
                if isinstance(module, torch.nn.LayerNorm) and output.requires_grad:
                    output.register_hook(lambda gradient: gradient * 0.9)
            torch.nn.modules.module.register_module_forward_hook(shrink)
            return super().set_device(local_rank)""",
    "optimizer": """
        def end_step(self, optimizer, **kwargs):
            optimizer.param_groups[0]["lr"] *= 1.5
            super().end_step(optimizer, **kwargs)""",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("forward", "first in the forward pass of step 1, at encoder.attn_layers.0.norm1: "),
        ("backward", "first in the backward pass of step 1, at encoder.attn_layers.1.norm2.weight: "),
        pytest.param("optimizer", "first in the optimizer's step of step 1, at ", marks=pytest.mark.slow),
    ],
)
def test_what_departs_first_is_named(exp, part, text):
    (exp.folder / "lib").mkdir()
    body = dedent(BROKEN[part]).strip().replace("\n", "\n    ")
    (exp.folder / "lib" / "broken.py").write_text(
        f"from exp.backends.cpu import CpuBackend\n\n\nclass Broken(CpuBackend):\n    {body}\n"
    )
    (exp.folder / "conf" / "backend").mkdir(parents=True)
    (exp.folder / "conf" / "backend" / "broken.yaml").write_text("_target_: broken.Broken\nname: broken\n")
    done = exp("--config-dir", "conf", *SMALL, "backend=broken", "steps=2", PYTHONPATH=str(exp.folder / "lib"))
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith(f"error: broken departs from cpu {text}"), done.stderr
    assert "broken and cpu DO NOT AGREE" in done.stdout
    result = exp.result("run")
    assert result["status"] == "failed"
    assert text in result["error"]["message"]
    table = (exp.path("run") / "differences.csv").read_text().splitlines()
    assert table[0] == "kind,step,name,absolute,relative,allowed"
    assert (exp.path("run") / "tested" / "trace.npz").is_file()


NOISY = """
import torch.nn.functional as F
from torch import nn
from exp.forecasting.timebridge import TimeBridge


class Noisy(TimeBridge):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.embedding = Embedding(self.embedding)


class Embedding(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, series):
        return F.dropout(self.inner(series), 0.5, self.training)
"""


@pytest.mark.slow
def test_a_module_that_still_draws_random_numbers_is_named(exp):
    (exp.folder / "noisy.py").write_text(NOISY)
    settings = ["model._target_=noisy.Noisy", "backend=cpu", "steps=1"]
    done = exp(*SMALL, *settings, PYTHONPATH=str(exp.folder))
    assert done.returncode == 0, done.stderr
    assert "embedding still drew random numbers, although dropout is off" in done.stdout
    report = json.loads((exp.path("run") / "parity.json").read_text())
    assert report["random_modules"] == ["embedding"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "code", "text"),
    [
        (["reference=null"], 2, "set reference="),
        (["reference=nothing"], 2, "reference=nothing is not a choice"),
        (["reference=cuda"], 3, "backend=cuda is not available"),
        (["steps=0"], 2, "steps=0 must be at least 1"),
        (["task=train"], 2, "add task=parity"),
        (["launcher.nnodes=2", "launcher.rdzv_endpoint=127.0.0.1:1"], 2, "one node"),
    ],
)
def test_what_cannot_be_compared_is_refused(exp, settings, code, text):
    done = exp(*SMALL, "backend=cpu", *settings)
    assert done.returncode == code
    assert text in done.stderr.splitlines()[0]
    assert not exp.path("run").exists()


@pytest.mark.slow
def test_steps_of_a_training_are_called_max_steps(exp):
    done = exp(*TINY, "steps=3", "output_dir=run")
    assert done.returncode == 2
    assert "for task=train, set max_steps=3" in done.stderr.splitlines()[0]
