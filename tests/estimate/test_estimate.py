"""``task=estimate``: figures that were worked out by hand, those that simulated cards count, and the command."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
import torch
from exp.backends.cpu import CpuBackend
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from exp.compat import supports_estimates
from exp.config.schema import ExpConfig, LauncherConfig
from exp.data.base import Data
from exp.errors import ConfigError
from exp.models.base import Model
from exp.tasks.train import Train
from tests.conftest import TINY
from tests.docs.reader import PAGES, ROOT, lines_of
from tests.simulators import needs_current_card

needs_newer_torch = pytest.mark.skipif(not supports_estimates(), reason="torch < 2.1 cannot estimate")
SHARDING = pytest.mark.skipif(not (ROOT / "conf" / "wrapper" / "fsdp.yaml").is_file(), reason="no wrapper=fsdp")
IMAGES = ["experiment=dinov3_eurosat", "data.eval_batch_size=8", "global_batch_size=8"]
SERIES = ["data.lookback=192", "model.d_model=32", "model.d_ff=32", "model.num_heads=2"]


class Two(Model):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256, bias=False)
        self.second = nn.Linear(256, 32, bias=False)

    def forward(self, x, mode="loss"):
        return {"loss": self.second(self.first(x).relu()).mean()}


@pytest.mark.skipif(supports_estimates(), reason="this torch can estimate")
def test_an_older_torch_refuses_and_says_where_else(exp):
    done = exp(*TINY, "task=estimate", "output_dir=run")
    assert done.returncode == 3, done.stderr
    assert "needs torch 2.1 or newer" in done.stderr.splitlines()[0]
    assert not exp.path("run").exists()


@needs_newer_torch
def test_memory_is_counted_by_storage_and_to_its_end():
    from exp.estimate.tracker import MemoryTracker

    tracker = MemoryTracker()
    with tracker:
        one = torch.empty(1024, device="meta")
        view = one.view(32, 32)[:4]
        assert tracker.now["activations"] == 4096
        two = one + 1
        assert tracker.peak == 8192
        del one
        assert tracker.now["activations"] == 8192  # a view holds it
        del view
        assert tracker.now["activations"] == 4096
        small = torch.empty(3, device="meta")
    tracker.count([two], "gradients", share=0.5)
    assert (tracker.now["gradients"], tracker.now["activations"]) == (2048, 512)
    tracker.restart()
    assert tracker.peak == 2560
    del two, small
    assert sum(tracker.now.values()) == 0


@needs_newer_torch
def test_operations_of_two_layers_are_those_of_theory():
    from exp.estimate.trace import trace_flops

    batch = {"x": torch.empty(8, 64, device="meta")}
    first, second = 2 * 8 * 64 * 256, 2 * 8 * 256 * 32
    # Forward; backward once for the weights, and for the inputs of the second layer alone.
    assert trace_flops(Two().to("meta"), batch, contextlib.nullcontext()) == 2 * first + 3 * second


@needs_newer_torch
def test_a_card_keeps_bytes_of_dropout_halves_of_weights_and_no_scores():
    from exp.estimate.as_on_card import AsOnCard
    from exp.estimate.tracker import MemoryTracker

    def kept(precision, fused, call, *shapes):
        tracker, on_card = MemoryTracker(), AsOnCard(precision, fused)
        inputs = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
        with tracker, on_card, on_card.autocast():
            output = call(*inputs)
        total = tracker.now["activations"]
        return total - output.numel() * output.element_size()

    count = 64 * 1024
    assert kept("fp32", False, lambda x: F.dropout(x, 0.5), (64, 1024)) == count
    # Input and weight in half precision, beside the output; a second product casts neither of them again.
    assert kept("bf16", False, lambda x, w: x @ w, (64, 1024), (1024, 128)) == 2 * (count + 1024 * 128)
    assert kept("bf16", False, lambda w: (w @ w) @ w, (64, 64)) == 2 * (64 * 64 + 64 * 64)
    heads = [(2, 4, 256, 32)] * 3
    scores, rows = 4 * 2 * 4 * 256 * 256, 4 * 2 * 4 * 256
    attention = F.scaled_dot_product_attention if hasattr(F, "scaled_dot_product_attention") else None
    assert kept("fp32", True, attention, *heads) == rows
    assert kept("fp32", False, attention, *heads) >= scores


@needs_current_card
@pytest.mark.parametrize(
    ("overrides", "nproc"),
    [
        ([*SERIES, "global_batch_size=64", "data.eval_batch_size=4"], 2),
        ([*SERIES, "global_batch_size=4", "data.eval_batch_size=64", "precision=bf16"], 1),
        ([*IMAGES, "global_batch_size=32", "precision=bf16"], 1),  # where portable kernels take float32 inside
        pytest.param([*IMAGES, "wrapper=fsdp"], 2, marks=SHARDING),
    ],
    ids=["training", "validation", "images", "sharded"],
)
def test_within_a_tenth_of_what_simulated_cards_count(exp, overrides, nproc):
    common = ["backend=gcu_simulated", f"nproc={nproc}", "schedule=constant", *overrides]
    for task, name in (("estimate", "estimated"), ("speed", "counted")):
        limits = ["task.warm_up=1", "max_steps=3", "debug.val_batches=1"] if task == "speed" else []
        done = exp(f"task={task}", f"output_dir={name}", *common, *limits)
        assert done.returncode == 0, done.stderr
    estimated, counted = exp.result("estimated")["memory_peak"], exp.result("counted")["memory_by_rank"]
    assert len(estimated) == len(counted) == nproc
    assert all(abs(one / other - 1) < 0.1 for one, other in zip(estimated, counted)), (estimated, counted)


@needs_newer_torch
def test_the_batch_that_fits_is_the_largest_and_keeps_the_global_one(exp):
    """On cards of a vendor that are not here, with a series that is not here."""
    given = ["experiment=timebridge_weather", "backend=cuda", "nproc=4", *SERIES, "data.eval_batch_size=4"]
    done = exp("task=estimate", "output_dir=whole", "task.memory_gib=64", *given)
    assert done.returncode == 0, done.stderr
    whole = json.loads((exp.path("whole") / "estimate.json").read_text())
    assert whole["fits"]
    assert whole["advice"]["accumulate"] == 1
    assert whole["reduced_bytes_per_step"] == 4 * whole["trained_parameters"]
    assert whole["sent_bytes_per_rank_and_step"] == int(2 * whole["reduced_bytes_per_step"] * 3 / 4)
    assert 2 < whole["checkpoint_bytes"] / whole["weights_bytes"] <= 3.01  # Adam keeps two numbers for each
    assert "weather.csv" in whole["notes"][0]

    memory = whole["memory"]["training"]["total"] * 0.6
    done = exp("task=estimate", "output_dir=part", f"task.memory_gib={memory / 2**30}", "task.headroom=0", *given)
    assert done.returncode == 0, done.stderr
    part = json.loads((exp.path("part") / "estimate.json").read_text())
    assert not part["fits"]
    assert part["advice"]["batch_size"] * part["advice"]["accumulate"] * 4 == part["global_batch_size"] == 32
    assert 1 < part["advice"]["accumulate"] < 8
    assert part["advice"]["memory"] <= memory
    assert f"accumulate={part['advice']['accumulate']} keeps the global batch" in " ".join(done.stdout.split())
    largest = part["largest_batch_size"]
    assert part["advice"]["batch_size"] <= largest < 8
    done = exp("task=estimate", "output_dir=more", *given, f"batch_size={largest + 1}")
    assert exp.result("more")["estimate"]["memory"]["training"]["total"] > memory


@needs_newer_torch
def test_a_model_that_reads_values_is_refused(exp):
    (exp.folder / "reading.py").write_text(
        "from exp.forecasting.timebridge import TimeBridge\n"
        "class Reading(TimeBridge):\n"
        "    def forward(self, *args, **kwargs):\n"
        "        found = super().forward(*args, **kwargs)\n"
        "        found['loss'].item()\n"
        "        return found\n"
    )
    done = exp(*TINY, "task=estimate", "model._target_=reading.Reading", "output_dir=run")
    assert done.returncode == 2, done.stderr
    assert "a training step that reads values cannot be estimated" in done.stderr.splitlines()[0]


class Pairs(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return {"x": torch.ones(4), "pair": (torch.ones(2), {"deep": torch.ones(3)})}


class PairData(Data):
    def __init__(self):
        self.train = self.val = self.test = Pairs()

    def metrics(self, detailed=False):
        raise NotImplementedError


class OfPairs(Model):
    def __init__(self, detached=False):
        super().__init__()
        self.layer, self.detached = nn.Linear(4, 1), detached

    def forward(self, x, pair=None, mode="tensor", **_):
        loss = self.layer(x).mean() + pair[0].sum() + pair[1]["deep"].sum()
        return {"loss": loss.detach() if self.detached else loss}


@needs_newer_torch
def test_tensors_within_a_batch_are_estimated_and_a_loss_without_a_gradient_is_refused():
    from exp.estimate.trace import Tracer

    config = OmegaConf.structured(ExpConfig)
    config.name, config.task, config.batch_size, config.global_batch_size = "own", OmegaConf.structured(Train), 4, 4
    config.data, config.model = ({"_target_": f"{__name__}.{name}"} for name in ("PairData", "OfPairs"))
    config.launcher = OmegaConf.structured(LauncherConfig)
    config.wrapper.kind, config.optim.type, config.optim.lr = "none", "Adam", 0.1
    tracer = Tracer(config, CpuBackend(name="cpu"))
    assert tracer.peak.by_kind["batch"] == 3 * 512  # one page of the allocator's for each of them
    assert tracer.validate() is not None
    config.model["detached"] = True
    with pytest.raises(ConfigError, match="gradient"):
        Tracer(config, CpuBackend(name="cpu"))


@needs_newer_torch
def test_every_command_of_the_pages_runs_as_it_is_written(exp):
    commands = [command for page in PAGES if page.stem in ("estimate", "scale") for command in lines_of(page)]
    assert len(commands) == 4
    for number, command in enumerate(commands):
        words = re.sub(r"^python -m exp ", "", command).split()
        smaller = SERIES[1:] if "timebridge" in command else ["model.depth=6"]
        done = exp(*words, *smaller, f"output_dir=run{number}", COLUMNS="80")
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert exp.result(f"run{number}")["estimate"]["parameters"] > 1000
