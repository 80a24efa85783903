"""Simulated cards of both generations: what a job for cards does, seen without any."""

from __future__ import annotations

import json
import re

import pytest

from tests.behaviour.conftest import CARDS, STEADY, first_line, losses, result
from tests.simulators import needs_card, needs_current_card, needs_legacy_card

pytestmark = [pytest.mark.extended, pytest.mark.legacy, needs_card]

OWN_GCU = """
import os
from exp.hardware.registry import create_backend
Gcu = type(create_backend({"_target_": "gcu", "name": "gcu"}))  # the class for cards of this torch's generation
"""
NEEDLESS = {"model.attention_dropout=0"}


def test_eight_cards_compute_what_the_cpu_does_each_rank_on_its_own(trained):
    run = trained("eight_cards")
    told = result(run)
    assert told["simulated"] is True
    assert "eccl" in told["process_group"]
    assert told["fallback"] is None
    assert [device["index"] for device in told["devices"]] == list(range(8))
    assert losses(run) == pytest.approx(losses(trained("steady")), rel=1e-5)
    assert told["metrics"] == pytest.approx(result(trained("steady"))["metrics"], rel=1e-5)
    for rank in range(8):
        log = (run / "logs" / f"rank{rank}.log").read_text()
        placed = re.search(r"tensors by device: (\S+) \d+\n((?:  .*\n)+)", log)
        assert placed, log
        assert placed.group(1) == f"{told['device_type']}:{rank}"
        assert f"{told['device_type']}:{rank}, shape (" in placed.group(2)


def test_no_operator_of_a_training_leaves_the_card(exp):
    """A strict card raises where one would; nor does a graph that is never ended outgrow its limit."""
    more = ["model.num_patches_out=2", "precision=fp32", "nproc=1", "max_steps=20"]
    done = exp(*CARDS, *more, "output_dir=run", SIM_GCU_STRICT="1", SIM_GCU_GRAPH_LIMIT="4000")
    assert done.returncode == 0, done.stderr
    left = exp.result("run")["cpu_fallbacks"]
    assert left is None or (left["calls_per_step"], left["bytes_per_step"]) == (0, 0)


@needs_current_card
@pytest.mark.parametrize("experiment", ["scenes", "tiles"])
def test_images_neither(exp, experiment, trained):
    from tests.behaviour import conftest

    words = [word for word in getattr(conftest, experiment.upper()) if word != "backend=cpu"]
    done = exp(*words, "backend=gcu", "backend.simulate=true", "output_dir=run", SIM_GCU_STRICT="1")
    assert done.returncode == 0, done.stderr
    assert exp.result("run")["cpu_fallbacks"]["calls_per_step"] == 0
    assert losses(exp.path("run")) == pytest.approx(losses(trained(experiment)), rel=1e-4)


LEAVES = """
import torch
from mmengine.hooks import Hook

class Leaves(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        torch.trunc(torch.ones(64, device=runner.device))
"""


@needs_current_card
def test_what_does_leave_the_card_is_counted_and_said(exp):
    (exp.folder / "leaves.py").write_text(LEAVES)
    done = exp(*CARDS, "plugins=[leaves]", "hooks=[{type: leaves.Leaves}]", "output_dir=run")
    assert done.returncode == 0, done.stderr
    left = exp.result("run")["cpu_fallbacks"]
    assert left["operators"]["trunc"] == {"calls_per_step": 1, "bytes_per_step": 512}
    assert "trunc" in done.stdout


@needs_current_card  # the older plug-in does not give its generator's state
def test_a_resumed_run_restores_the_cards_random_state(exp):
    words = [*(word for word in CARDS if word not in NEEDLESS), "nproc=2"]
    for name, more in (("whole", []), ("half", ["resume=whole/checkpoints/step_00000002.pth"])):
        done = exp(*words, *more, f"output_dir={name}")
        assert done.returncode == 0, done.stderr
    whole = losses(exp.path("whole"))
    assert losses(exp.path("half")) == {step: whole[step] for step in (3, 4)}
    assert exp.result("half")["metrics"] == exp.result("whole")["metrics"]


def test_precisions_are_the_card_s(exp):
    for precision in ("bf16", "fp16"):
        done = exp(*CARDS, f"precision={precision}", f"output_dir={precision}")
        if needs_legacy_card.args[0]:
            assert done.returncode == 0, done.stderr
            assert exp.result(precision)["precision"] == precision
        else:  # the generation whose driver crashed
            assert done.returncode == 2
            assert "fp32" in first_line(done)


def test_more_ranks_than_cards_and_ranks_that_share_one_are_refused(exp):
    done = exp(*CARDS, "nproc=16")
    assert done.returncode == 3
    assert "nproc=8" in first_line(done)
    (exp.folder / "mine.py").write_text(OWN_GCU + (
        "\nclass First(Gcu):\n    def set_device(self, local_rank):\n        return super().set_device(0)\n"
    ))  # fmt: skip
    shared = ["nproc=2", "backend._target_=mine.First", "backend.process_group=gloo"]
    done = exp(*CARDS, *shared, "output_dir=run")
    assert done.returncode == 1
    assert "ranks 0 and 1" in first_line(done)


def test_without_the_cards_collectives_tensors_are_staged_where_that_is_allowed_and_on_every_rank(exp, trained):
    (exp.folder / "mine.py").write_text(OWN_GCU + (
        "\nclass Halved(Gcu):  # a machine on which one rank's collectives are not there\n"
        "    def __init__(self, *given, **named):\n        super().__init__(*given, **named)\n"
        "        self.collectives.missing = lambda *_: 'no libeccl.so' if os.environ['RANK'] == '1' else None\n"
    ))  # fmt: skip
    halved = [*CARDS, "nproc=2", "backend._target_=mine.Halved"]
    done = exp(*halved, "output_dir=run")
    assert done.returncode == 3
    assert "rank 1: no libeccl.so" in done.stderr.splitlines()[0]
    for name, words, shell in (
        ("allowed", [*halved, "backend.allow_fallback=true"], {}),
        ("named", [*CARDS, "nproc=2", "backend.process_group=gloo"], {"TORCH_DISTRIBUTED_BACKEND": "nonsense"}),
        ("shell", [*CARDS, "nproc=2"], {"TORCH_DISTRIBUTED_BACKEND": "gloo"}),
    ):
        done = exp(*words, f"output_dir={name}", **shell)
        assert done.returncode == 0, done.stderr
        told = exp.result(name)
        assert told["process_group"] == told["fallback"]["used"] == "gloo, staged through the CPU"
        assert losses(exp.path(name)) == pytest.approx(losses(trained("steady")), rel=1e-5)
        for rank in (0, 1):
            assert "gloo, staged" in (exp.path(name) / "logs" / f"rank{rank}.log").read_text()
        lines = map(json.loads, (exp.path(name) / "metrics.jsonl").read_text().splitlines())
        assert all(line["staged_bytes_per_step"] > 10_000 for line in lines if line["split"] == "train")


MODEL_ON_THE_CPU = """
import torch
from exp.forecasting.timebridge.model import TimeBridge
class Stuck(TimeBridge):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.stuck = torch.nn.Parameter(torch.zeros(2, 3))
    def _apply(self, function, *arguments, **options):  # what a hand-written .to() may do
        super()._apply(function, *arguments, **options)
        self.stuck = torch.nn.Parameter(self.stuck.detach().cpu())
        return self
class Renewed(TimeBridge):
    def _apply(self, function, *arguments, **options):  # new parameters at every move
        super()._apply(function, *arguments, **options)
        self.renewed = torch.nn.Parameter(function(torch.zeros(2)))
        return self
"""


def test_a_model_that_is_not_wholly_on_its_card_is_named_and_the_optimizer_has_its_parameters(exp):
    (exp.folder / "mine.py").write_text(MODEL_ON_THE_CPU)
    done = exp(*CARDS, "model._target_=mine.Stuck", "output_dir=run")
    assert done.returncode == 1, done.stdout
    assert "stuck" in done.stderr
    assert "Traceback" not in done.stderr
    done = exp(*CARDS, "model._target_=mine.Renewed", "output_dir=renewed")
    assert done.returncode == 0, done.stderr


@needs_current_card
def test_out_of_memory_proposes_a_batch_that_keeps_the_global_one(exp):
    words = [*(word for word in CARDS if "batch_size" not in word), "model.d_model=64", "model.num_heads=4"]
    done = exp(*words, "global_batch_size=512", "output_dir=run", SIM_GCU_MEMORY="24MiB")
    assert done.returncode == 1, done.stdout
    advice = re.search(r"(batch_size=\d+) (accumulate=\d+)", first_line(done).partition("; ")[2])
    assert advice, done.stderr
    again = exp(*words, *advice.groups(), "output_dir=again", SIM_GCU_MEMORY="24MiB")
    assert again.returncode == 0, again.stderr
    assert exp.result("again")["global_batch_size"] == 512


@needs_current_card
def test_synchronised_batch_norm_is_reverted_with_a_warning(exp):
    (exp.folder / "mine.py").write_text("""
import torch
from exp.models.base import Model
class Normed(Model):
    def __init__(self, channels, lookback, horizon, **_):
        super().__init__()
        self.norm, self.out = torch.nn.SyncBatchNorm(channels), torch.nn.Linear(lookback, horizon)
    def forward(self, x, y, mode="loss", **_):
        forecast = self.out(self.norm(x.transpose(1, 2))).transpose(1, 2)
        return forecast if mode == "predict" else {"loss": (forecast - y).square().mean()}
""")
    done = exp(*CARDS, "nproc=2", "model._target_=mine.Normed", "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("batch norm") == 1


def test_the_doctor_examines_cards_and_names_the_rank_without_one(exp):
    doctor = ["task=doctor", "backend=gcu", "backend.simulate=true", "task.burst_s=0.2", "nproc=2"]
    done = exp(*doctor, "output_dir=well")
    assert done.returncode == 0, done.stdout
    done = exp(*doctor, "output_dir=ill", SIM_GCU_COUNT="1")
    assert done.returncode == 1
    found = json.loads((exp.path("ill") / "doctor.json").read_text())["findings"]
    assert [(each["check"], each["ranks"]) for each in found if each["status"] == "failed"] == [("device", [1])]


def test_parity_with_the_cpu_is_measured_and_cards_are_in_sweeps(exp):
    done = exp(*CARDS, "task=parity", "reference=cpu", "steps=3", "output_dir=parity")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((exp.path("parity") / "parity.json").read_text())["agrees"] is True
    done = exp("-m", *STEADY, "backend=cpu,gcu_simulated", "output_dir=sweep", "sweep.plots=false")
    assert done.returncode == 0, done.stderr
    one, other = (exp.result(f"sweep/{job}")["metrics"]["mse"] for job in (0, 1))
    assert one == pytest.approx(other, rel=1e-5)


@needs_current_card
def test_without_a_compiler_it_says_what_to_install(exp):
    done = exp(*CARDS, SIM_GCU_CACHE=str(exp.folder / "empty"), CXX="no-such-compiler")
    assert done.returncode == 3
    assert "no-such-compiler" in first_line(done)
