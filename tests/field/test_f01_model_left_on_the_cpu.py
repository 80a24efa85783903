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
import torch
from exp.backends.cpu import CpuBackend

from exp.engine.placement import check_optimizer
from exp.engine.wrapper import wrap
from exp.errors import PlacementError
from tests.field.conftest import CARDS, JOIN
from tests.simulators import needs_card, needs_current_card


@needs_current_card
def test_stock_mmengine_leaves_the_model_on_the_cpu(stock):
    script = (
        JOIN
        + """
import torch_gcu
from mmengine.model import BaseModel
from mmengine.runner import Runner
torch.gcu.set_device(rank)
join("cpu:gloo,gcu:eccl")  # MMEngine's own way ends earlier: see F5
class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
    def forward(self, inputs, mode="tensor"):
        return {"loss": self.layer(inputs).sum()}
training = {"by_epoch": True, "max_epochs": 1}
optimizer = {"optimizer": {"type": "SGD", "lr": 0.1}}
Runner(model=Model(), work_dir="work", launcher="pytorch", train_dataloader=[], train_cfg=training,
       optim_wrapper=optimizer, log_level="ERROR")
"""
    )
    for ended in stock(script, world_size=2, card=True):
        assert ended.returncode == 1
        said = ended.printed.splitlines()[-1]
        assert "device_ids and output_device arguments only work with single-device/multiple-device GPU modules" in said
        assert "{device(type='cpu')}" in said


@needs_current_card
def test_stock_torch_trains_nothing_with_an_optimizer_built_too_early(stock):
    script = """
        import torch, torch_gcu
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model = model.to("gcu")  # makes new parameters
        before = model.weight.detach().clone()
        model(torch.ones(1, 2, device="gcu")).sum().backward()
        optimizer.step()
        assert torch.equal(model.weight, before)
    """
    (ended,) = stock(script, card=True)
    assert ended.returncode == 0, ended.printed
    model = torch.nn.Linear(2, 2)
    with pytest.raises(PlacementError, match="2 tensors of the optimizer are not parameters of the model"):
        check_optimizer(torch.nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=1.0), rank=0)


@needs_current_card
def test_stock_ddp_takes_the_device_ids_of_another_card(stock):
    script = (
        JOIN
        + """
import torch_gcu
join("eccl")
nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to("gcu:1"), device_ids=[0])
"""
    )
    (ended,) = stock(script, card=True)
    assert ended.returncode == 0, ended.printed

    class Wrong(CpuBackend):
        def ddp_kwargs(self, device):
            return {"device_ids": [3]}

    with pytest.raises(PlacementError, match=r"gives DDP device_ids=\[3\] for a model on cpu:0"):
        wrap(torch.nn.Linear(2, 2), "ddp", {}, Wrong(name="wrong"), torch.device("cpu", 0))


@needs_card
def test_exp_places_the_model_and_names_what_is_elsewhere(exp, library):
    placed = exp(*CARDS, "nproc=2", "report_placement=true", "output_dir=placed")
    assert placed.returncode == 0, placed.stderr
    mine = library("""
        import torch
        from exp.models.timebridge import TimeBridge
        class Stuck(TimeBridge):
            def __init__(self, **settings):
                super().__init__(**settings)
                self.stuck = torch.nn.Parameter(torch.zeros(2, 3))
            def _apply(self, function, *arguments, **options):  # what a hand-written .to() may do
                super()._apply(function, *arguments, **options)
                self.stuck = torch.nn.Parameter(self.stuck.detach().cpu())
                return self
    """)
    done = exp(*CARDS, "nproc=2", "model._target_=mine.Stuck", "output_dir=stuck", **mine)
    assert done.returncode == 1
    first, *details = done.stderr.splitlines()
    assert "parameters and buffers are not on" in first
    assert any("stuck: cpu, shape (2, 3)" in line for line in details)
