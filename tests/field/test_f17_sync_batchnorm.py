"""F17: SyncBatchNorm crashed on GCU, and was replaced by string surgery on the config.

With exp batch norms are converted by the backend's capability: synchronised where it can, reverted with a warning where
it cannot. Weights and running statistics are kept.
"""

from __future__ import annotations

import torch
from exp.backends.cpu import CpuBackend

from exp.engine.batchnorm import fit_batchnorm
from tests.field.conftest import CARDS, JOIN
from tests.simulators import needs_current_card

MODEL = """
    import torch
    from exp.models.base import Model
    class Normed(Model):
        def __init__(self, channels, lookback, horizon, **_unused):
            super().__init__()
            self.norm = torch.nn.SyncBatchNorm(channels)
            self.out = torch.nn.Linear(lookback, horizon)
        def forward(self, x, y, mode="loss", **_unused):
            forecast = self.out(self.norm(x.transpose(1, 2))).transpose(1, 2)
            return forecast if mode == "predict" else {"loss": (forecast - y).square().mean()}
"""


@needs_current_card
def test_stock_sync_batchnorm_fails_on_the_card(stock):
    script = (
        JOIN
        + """
import torch_gcu
torch.gcu.set_device(rank)
join("cpu:gloo,gcu:eccl")
norm = nn.parallel.DistributedDataParallel(nn.SyncBatchNorm(3).to("gcu"), device_ids=[rank])
norm(torch.randn(4, 3, device="gcu"))
"""
    )
    for ended in stock(script, world_size=2, card=True):
        assert ended.returncode == 1
        assert "SyncBatchNorm expected input tensor to be on" in ended.printed or "batch_norm_stats" in ended.printed


@needs_current_card
def test_exp_reverts_it_on_the_card_with_a_warning(exp, library):
    mine = library(MODEL)
    done = exp(*CARDS, "nproc=2", "model._target_=mine.Normed", "output_dir=run", **mine)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("warning: backend=gcu has no synchronised batch norm") == 1


def test_conversion_keeps_the_weights_in_both_directions():
    class Able(CpuBackend):
        supports_sync_batchnorm = True

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
    model(torch.randn(8, 3, 5, 5))
    state, weight = {name: value.clone() for name, value in model.state_dict().items()}, model[1].weight
    converted, warning = fit_batchnorm(model, Able(name="able"), synchronise=True)
    assert isinstance(converted[1], torch.nn.SyncBatchNorm)
    assert warning is None
    reverted, warning = fit_batchnorm(converted, CpuBackend(name="cpu"), synchronise=False)
    assert not any(isinstance(module, torch.nn.SyncBatchNorm) for module in reverted.modules())
    assert warning.startswith("backend=cpu has no synchronised batch norm")
    assert reverted[1].weight is weight  # the optimizer's, too
    assert all(torch.equal(value, state[name]) for name, value in reverted.state_dict().items())
    reverted(torch.randn(8, 3, 5, 5))
