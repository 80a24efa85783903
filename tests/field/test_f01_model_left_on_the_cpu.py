"""F1: the model was still on the CPU when DDP wrapped it.

"DistributedDataParallel device_ids and output_device arguments only work with single-device/multiple-device GPU modules
..., but got device_ids [0] ... module parameters {device(type='cpu')}", on all 8 ranks. MMEngine does not know the
device, leaves the model on the CPU, and passes device_ids=[LOCAL_RANK] all the same.

With exp the backend alone places the model and supplies DDP's device arguments; before wrapping, every parameter and
buffer is checked, and what is elsewhere is named. Two traps beside it are checked as well: an optimizer that was built
before the model was moved trains nothing, and DDP takes device_ids of another card than the model's without a word.
"""

from __future__ import annotations

import pytest

from tests.field.conftest import CARD, CARDS, JOIN, OWN_GCU
from tests.simulators import needs_card, needs_current_card


@needs_card
def test_stock_mmengine_leaves_the_model_on_the_cpu(stock):
    script = """
        from mmengine.model import BaseModel
        from mmengine.runner import Runner
        plugin.set_device(rank)
        join("cpu:gloo,gcu:eccl" if kind == "gcu" else "gloo")  # MMEngine's own way ends earlier: see F5
        class Model(BaseModel):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)
            def forward(self, inputs, mode="tensor"):
                return {"loss": self.layer(inputs).sum()}
        Runner(
            model=Model(), work_dir="work", launcher="pytorch", log_level="ERROR",
            train_dataloader=[], train_cfg={"by_epoch": True, "max_epochs": 1},
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
        )
    """
    for rank, ended in enumerate(stock(script, world_size=2, card=True, begin=JOIN + CARD)):
        assert ended.returncode == 1
        assert "device_ids and output_device arguments only work with single-device/multiple-device GPU" in ended.last
        assert f"but got device_ids [{rank}]" in ended.last
        assert "{device(type='cpu')}" in ended.last


@needs_card
def test_exp_places_the_model_on_the_card_of_its_rank(eight_cards):
    for rank in range(8):
        kind = eight_cards.result["device_type"]
        (line,) = [line for line in eight_cards.log(rank).splitlines() if "tensors by device" in line]
        placed = line.partition("tensors by device: ")[2]
        assert placed.split()[0] == f"{kind}:{rank}"
        assert "," not in placed  # on that card only


@pytest.mark.slow
@needs_card
def test_exp_names_what_is_elsewhere(exp, library):
    mine = library("""
        import torch
        from exp.forecasting.timebridge import TimeBridge
        class Stuck(TimeBridge):
            def __init__(self, **settings):
                super().__init__(**settings)
                self.stuck = torch.nn.Parameter(torch.zeros(2, 3))
            def _apply(self, function, *arguments, **options):  # what a hand-written .to() may do
                super()._apply(function, *arguments, **options)
                self.stuck = torch.nn.Parameter(self.stuck.detach().cpu())
                return self
    """)
    done = exp(*CARDS, "model._target_=mine.Stuck", "output_dir=run", **mine)
    assert done.returncode == 1
    first, *details = done.stderr.splitlines()
    assert "failed: rank" in first
    assert "parameters and buffers are not on" in first
    assert details[0] == "  stuck: cpu, shape (2, 3)"


@needs_card
def test_stock_torch_trains_nothing_with_an_optimizer_built_too_early(stock):
    script = """
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model = model.to(kind)  # makes new parameters
        before = model.weight.detach().clone()
        model(torch.ones(1, 2, device=kind)).sum().backward()
        optimizer.step()
        print("nothing was learned:", torch.equal(model.weight, before))
    """
    (ended,) = stock(script, card=True, begin=CARD)
    assert ended.last == "nothing was learned: True"


@needs_card
def test_exp_refuses_an_optimizer_of_other_parameters(exp, library):
    mine = library("""
        import torch
        from exp.forecasting.timebridge import TimeBridge
        class Renewed(TimeBridge):
            def _apply(self, function, *arguments, **options):  # new parameters at every move
                super()._apply(function, *arguments, **options)
                self.renewed = torch.nn.Parameter(function(torch.zeros(2)))
                return self
    """)
    done = exp(*CARDS, "model._target_=mine.Renewed", "output_dir=run", **mine)
    assert done.returncode == 1
    assert "1 tensors of the optimizer are not parameters of the model" in done.stderr.splitlines()[0]


@needs_current_card
def test_stock_ddp_takes_the_device_ids_of_another_card(stock):
    script = """
        join("eccl")
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to("gcu:1"), device_ids=[0])
        print("wrapped")
    """
    (ended,) = stock(script, card=True, begin=JOIN + CARD)
    assert ended.last == "wrapped"


@pytest.mark.slow
@needs_card
def test_exp_refuses_the_device_ids_of_another_card(exp, library):
    mine = library(
        """
        class First(Gcu):
            def ddp_kwargs(self, device):
                return {"device_ids": [0], "output_device": 0}
        """,
        begin=OWN_GCU,
    )
    done = exp(*CARDS, "nproc=2", "backend._target_=mine.First", "output_dir=run", **mine)
    assert done.returncode == 1
    first = done.stderr.splitlines()[0]
    assert first.startswith("error: rank 1 ")
    assert "backend=gcu gives DDP device_ids=[0] for a model on" in first
