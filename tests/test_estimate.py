"""``task=estimate``: figures that simulated cards count, and the command; for operations, tests/engine/test_rate.py."""

from __future__ import annotations

import pytest
import torch
from exp.backends.cpu import CpuBackend
from omegaconf import OmegaConf
from torch import nn

from exp.config.schema import ExpConfig, LauncherConfig
from exp.data.base import Data
from exp.errors import ConfigError
from exp.estimate.tracer import Tracer
from exp.estimate.training import suggest_batch
from exp.hardware.compat import recompute_in_backward, supports_estimates
from exp.models.base import Model
from exp.tasks.train import Train
from tests.docs.reader import PAGES, lines_of
from tests.simulators import needs_current_card

if not supports_estimates():
    pytest.skip("torch < 2.3 cannot estimate", allow_module_level=True)

IMAGES = ["experiment=dinov3_eurosat", "data.eval_batch_size=8", "global_batch_size=8"]
SERIES = ["data.lookback=192", "model.d_model=32", "model.d_ff=32", "model.num_heads=2"]


SIMULATED = [
    ([*SERIES, "global_batch_size=4", "data.eval_batch_size=64"], 2),  # validation takes most
    ([*IMAGES, "global_batch_size=32", "precision=bf16"], 1),  # where portable kernels take float32 inside
    ([*IMAGES, "wrapper=fsdp"], 2),
]


@needs_current_card
@pytest.mark.parametrize(("overrides", "nproc"), SIMULATED)
def test_within_a_tenth_of_what_simulated_cards_count(exp, overrides, nproc):
    common = ["backend=gcu_simulated", f"nproc={nproc}", "schedule=constant", *overrides]
    for task, name in (("estimate", "estimated"), ("speed", "counted")):
        limits = ["task.warm_up=1", "max_steps=3", "debug.eval_batches=1"] if task == "speed" else []
        done = exp(f"task={task}", f"output_dir={name}", *common, *limits)
        assert done.returncode == 0, done.stderr
    estimated, counted = exp.result("estimated")["memory_peak"], exp.result("counted")["memory_peak"]
    assert len(estimated) == len(counted) == nproc
    assert all(abs(one / other - 1) < 0.1 for one, other in zip(estimated, counted)), (estimated, counted)


def test_the_batch_that_fits_is_the_largest_and_keeps_the_global_one(exp):
    """On cards of a vendor that are not here, with a series that is not here."""

    def estimate(name, *words):
        given = ["experiment=timebridge_weather", "backend=cuda", "nproc=4", *SERIES, "data.eval_batch_size=4"]
        done = exp("task=estimate", f"output_dir={name}", *given, *words)
        assert done.returncode == 0, done.stderr
        return {**exp.result(name), **exp.result(name)["estimate"]}

    whole = estimate("whole", "task.memory_gib=64")
    assert (whole["fits"], whole["advice"]["accumulate"]) == (True, 1)
    assert 2 < whole["checkpoint_bytes"] / whole["weights_bytes"] <= 3.01  # Adam keeps two numbers for each
    memory = whole["memory"]["training"]["total"] * 0.6
    part = estimate("part", f"task.memory_gib={memory / 2**30}", "task.headroom=0")
    advice, largest = part["advice"], part["largest_batch_size"]
    assert advice["batch_size"] * advice["accumulate"] * 4 == part["global_batch_size"] == 32
    assert (part["fits"], advice["memory"] <= memory, advice["batch_size"] <= largest < 8) == (False, True, True)
    assert estimate("more", f"batch_size={largest + 1}")["memory"]["training"]["total"] > memory


class PairData(Data):
    def __init__(self):
        sample = {"x": torch.ones(4), "pair": (torch.ones(2), {"deep": torch.ones(3)})}
        self.train = self.val = self.test = [sample] * 8

    metrics = None  # nobody measures anything


class OfPairs(Model):
    def __init__(self, change=None):
        super().__init__()
        self.scale = torch.linspace(0, 1, 3)[1].item()  # a value
        self.layer, self.change = nn.Linear(4, 1), change

    def forward(self, x, pair=None, mode="tensor", **_):
        loss = recompute_in_backward(self.layer, x * self.scale).mean() + pair[0].sum() + pair[1]["deep"].sum()
        return {"loss": loss if self.change is None else getattr(loss, self.change)()}


def test_any_batch_and_what_is_recomputed_are_estimated_and_losses_that_cannot_be_are_refused():
    config = OmegaConf.structured(ExpConfig)
    config.name, config.task, config.batch_size, config.global_batch_size = "own", OmegaConf.structured(Train), 4, 4
    config.data, config.model = ({"_target_": f"{__name__}.{name}"} for name in ("PairData", "OfPairs"))
    config.launcher = OmegaConf.structured(LauncherConfig)
    config.wrapper.kind, config.optim.type, config.optim.lr, config.precision = "none", "Adam", 0.1, "bf16"
    tracer = Tracer(config, CpuBackend(name="cpu"))
    assert tracer.peak["batch"] == 3 * 512  # one page of the allocator's for each of them
    assert tracer.validate() is not None
    config.wrapper.kind, config.nproc = "fsdp", 2  # four weights and a bias of four bytes each, in no block
    sharded = Tracer(config, tracer.backend)
    assert sharded.peak["wrapper"] == 2 * 5 * 4, "gathered weights and whole gradients"
    validation = sharded.validate()
    assert validation is not None
    assert validation["wrapper"] == 5 * 4, "all weights, beside the rank's share"
    config.wrapper.kind, config.nproc = "none", 1
    fits = [suggest_batch(config, tracer.backend, 2 * tracer.peak["total"], share) for share in (0.0, 0.9)]
    assert [each and each["accumulate"] for each in fits] == [2, None]
    for change, words in (("detach", "grad"), ("item", "reads values cannot be estimated")):
        config.model["change"] = change
        with pytest.raises(ConfigError, match=words):
            Tracer(config, CpuBackend(name="cpu"))


def test_every_command_of_the_pages_runs_as_it_is_written(exp):
    (page,) = (page for page in PAGES if page.stem == "estimate")
    lines = [line for line in lines_of(page) if "task=estimate" in line]
    for number, line in enumerate(lines):
        smaller = SERIES[1:] if "timebridge" in line else ["model.backbone.depth=6"]
        done = exp(*line.split()[3:], *smaller, f"output_dir=run{number}", COLUMNS="80")  # after python -m exp
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert exp.result(f"run{number}")["estimate"]["parameters"] > 1000
