"""task=qualify: a suite that is killed and goes on; one on cards with defects; what it leaves."""

from __future__ import annotations

import json
import time
from textwrap import dedent

from exp.hardware.compat import TORCH_VERSION
from tests.conftest import TINY, Forked
from tests.simulators import needs_current_card

EXAMPLE = "timebridge_small"
SUITE = ["task=qualify", "nproc=2", "output_dir=suite", f"task.experiments=[{EXAMPLE}]"]


def read(exp) -> dict:
    return json.loads((exp.path("suite") / "qualify.json").read_text())


def test_a_suite_that_is_killed_goes_on_where_it_was(exp):
    checks = 'task.checks=["operators-*-fp32",collectives]'
    arguments = [*SUITE, "backend=cpu", checks, "overwrite=false"]
    first, deadline = Forked(exp.folder, *arguments), time.monotonic() + 250
    while not (exp.path("suite") / "checks" / "collectives" / "output.log").exists():
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first.kill()
    name, before = f"operators-{EXAMPLE}-fp32", read(exp)["checks"]
    assert before[name]["status"] == "ok", before[name]
    assert before["collectives"]["status"] == "skipped"

    done = exp(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    suite = read(exp)
    assert suite["checks"][name] == before[name]  # not made again
    operators = {row["operator"]: row["status"] for row in suite["checks"][name]["values"]["table"]}
    assert {status for each, status in operators.items() if "backward" in each} == {"equal"}
    collectives, whole = suite["checks"]["collectives"], TORCH_VERSION >= (2, 0)  # before it, gloo knows no bf16
    assert suite["verdict"] == collectives["status"] == ("ok" if whole else "warning"), collectives
    assert whole or "refused: all_reduce bf16" in collectives["finding"]
    assert "all_reduce fp32" in {line["collective"] for line in collectives["values"]["table"]}
    assert suite["checks"]["doctor"]["finding"] == "left out by task.checks"
    assert "| operators-timebridge\\_small-fp32 |" in (exp.path("suite") / "qualify.md").read_text()
    files = [file for file in exp.path("suite").rglob("*") if file.is_file()]
    assert not [file for file in files if file.suffix in (".pth", ".npz")]

    refused = exp(*arguments, "nproc=3", OMP_NUM_THREADS="2")
    assert refused.returncode == 2
    assert "nproc=2" in refused.stderr
    assert "OMP_NUM_THREADS=1" in refused.stderr


DEFECTS = '''
    import os
    from dataclasses import replace

    import torch
    from exp.backends.gcu import GcuBackend

    LEFT = [0, 0]


    def quick(x, approximate="none"):
        return x * torch.sigmoid(1.702 * x)


    def through_the_cpu(x, dim=None, keepdim=False, dtype=None):
        LEFT[0] += 1
        LEFT[1] += 2 * x.numel() * x.element_size()
        return x.cpu().mean(dim, keepdim, dtype=dtype).to(x.device)


    def fatal(gradient, x, approximate="none"):
        os.abort()


    class Defective(GcuBackend):
        """Simulated cards: a wrong operator, one that leaves the card, one that ends the process."""

        def set_device(self, local_rank):
            device = super().set_device(local_rank)
            self.library = torch.library.Library("aten", "IMPL")
            self.library.impl("gelu", quick, "PrivateUse1")
            self.library.impl("mean.dim", through_the_cpu, "PrivateUse1")
            self.library.impl("gelu_backward", fatal, "PrivateUse1")
            return device

        @property
        def capabilities(self):
            known = super().capabilities
            lacking = known.lacking_operators - {"gelu_backward"}  # or it had a portable kernel, and no defect
            return replace(known, lacking_operators=lacking)

        def fallbacks(self):
            return {"mean": tuple(LEFT)}
'''


def backend_choice(exp, target):
    """A choice of ``backend`` for simulated cards of a class, and the arguments that select it."""
    choice = exp.path("my_conf") / "backend" / "mine.yaml"
    choice.parent.mkdir(parents=True)
    choice.write_text(f"_target_: {target}\nname: mine\nsimulate: true\n")
    return ["--config-dir", "my_conf", "backend=mine"]


@needs_current_card
def test_planted_defects_are_found_and_named(exp):
    (exp.folder / "defective.py").write_text(dedent(DEFECTS))
    arguments = [*backend_choice(exp, "defective.Defective"), *SUITE, 'task.checks=["operators-*-fp32"]']
    done = exp(*arguments, timeout=600, PYTHONPATH=str(exp.folder))
    assert done.returncode == 1, done.stdout + done.stderr
    row = read(exp)["checks"][f"operators-{EXAMPLE}-fp32"]
    assert row["status"] == "failed"
    for finding in (
        "aten.gelu_backward.default crashed", "SIGABRT", "aten.gelu.default wrong (",
        "aten.mean.dim left the card (1 calls, ",
    ):  # fmt: skip
        assert finding in row["finding"]
    found = {line["operator"]: line["status"] for line in row["values"]["table"]}
    assert [name for name, status in found.items() if status == "wrong"] == ["aten.gelu.default"]
    assert found["aten.convolution_backward.default"] == "equal"  # which comes after the crash
    assert "| aten.gelu.default | wrong |" in (exp.path("suite") / "qualify.md").read_text()


TOGETHER = """
    import torch
    from exp.backends.gcu import GcuBackend
    from exp.models.base import Model

    state = {"rounding": 0}


    def gelu(x, approximate="none"):  # wrong by itself
        return x * torch.sigmoid(1.702 * x)


    def tanh(x):  # right, but leaves the card in another state
        state["rounding"] += 1
        return torch.tanh(x.cpu()).to(x.device)


    def exp(x):  # right, unless the card is in that state
        wrong, state["rounding"] = state["rounding"] > 0, 0
        return torch.exp(x.cpu() * (1.1 if wrong else 1.0)).to(x.device)


    class Stateful(GcuBackend):
        def set_device(self, local_rank):
            device = super().set_device(local_rank)
            self.library = torch.library.Library("aten", "IMPL")
            for kernel in (gelu, tanh, exp):
                self.library.impl(kernel.__name__, kernel, "PrivateUse1")
            return device


    class Net(Model):
        def __init__(self, lookback, horizon, channels, **_):
            super().__init__()
            layers = torch.nn.Linear(lookback, 16), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(channels)
            self.layers = torch.nn.Sequential(*layers)
            self.last = torch.nn.Linear(16, horizon)

        def forward(self, x, y=None, mode="tensor", **_):
            features = torch.nn.functional.gelu(self.layers(x.transpose(1, 2)))
            output = self.last(torch.exp(torch.tanh(features))).transpose(1, 2)
            return {"loss": (output - y).square().mean()} if mode == "loss" else output
"""


@needs_current_card
def test_operators_that_are_wrong_only_together_are_named_for_any_model(exp):
    (exp.folder / "together.py").write_text(dedent(TOGETHER))
    settings = [*TINY[1:], *backend_choice(exp, "together.Stateful"), "model._target_=together.Net", "max_steps=2"]
    done = exp("task=operators", "output_dir=run", *settings, PYTHONPATH=str(exp.folder))
    assert done.returncode == 1, done.stdout + done.stderr
    values = exp.result("run")["check"]["values"]
    assert values["guilty"] == [["aten.gelu.default"], ["aten.exp.default", "aten.tanh.default"]]
