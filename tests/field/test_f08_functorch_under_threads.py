"""F8: "Trying to access a forward AD level with an invalid index", then "cannot unpack non-iterable NoneType".

nn.DataParallel runs one thread per card in one process. Forward-mode derivatives, and with them functorch's jacfwd,
keep their level per process: one thread ends the level that another one works in.

With exp there is one process per device, never DataParallel: a model that uses torch.func inside its forward pass
trains under DDP with the gradients of one process.
"""

from __future__ import annotations

import pytest
import torch

from tests.conftest import TINY
from tests.field.conftest import CARD, CARDS
from tests.simulators import needs_current_card


@needs_current_card
def test_stock_data_parallel_threads_break_forward_mode_jacobians(stock):
    # The part of DataParallel that runs its replicas, one thread for each; the parts around it are for CUDA only.
    script = """
        from torch import nn
        from torch.func import jacfwd, vmap
        from torch.nn.parallel import parallel_apply
        class Slopes(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
            def forward(self, points):
                return vmap(jacfwd(self.net))(points)
        replicas = [Slopes().to(f"gcu:{card}") for card in range(8)]
        for attempt in range(200):  # the first or one of the next few fails: it is a race
            shares = [torch.rand(4, 2, device=f"gcu:{card}") for card in range(8)]
            try:
                parallel_apply(replicas, shares, devices=list(range(8)))
            except RuntimeError as error:
                if "invalid index" in str(error):
                    raise
    """
    (ended,) = stock(script, card=True, begin=CARD)
    assert ended.returncode == 1
    assert "Trying to access a forward AD level with an invalid index" in ended.printed


JACOBIAN = """
    import torch
    from torch.func import jacfwd, vmap
    from exp.models.base import Model
    class Jacobian(Model):
        def __init__(self, channels, lookback, horizon, **_unused):
            super().__init__()
            self.short, self.horizon = torch.nn.Linear(lookback, 4), torch.nn.Linear(4, horizon)
            self.steer = torch.nn.Linear(4, 4)
        def forward(self, x, y, mode="loss", **_unused):
            latent = self.short(x.transpose(1, 2)).flatten(0, 1)  # (B C, 4)
            slopes = vmap(jacfwd(lambda z: torch.tanh(self.steer(z))))(latent)  # (B C, 4, 4)
            bent = (slopes @ latent.unsqueeze(-1)).squeeze(-1)
            forecast = self.horizon(latent + bent).unflatten(0, x.shape[::2]).transpose(1, 2)
            return forecast if mode == "predict" else {"loss": (forecast - y).square().mean()}
"""


@needs_current_card
def test_exp_trains_it_on_cards_as_one_process_does(exp, library):
    mine = library(JACOBIAN)
    # SGD with large steps: weights are gradients added up, and would tell a wrong one.
    settings = ["model._target_=mine.Jacobian", "optim=sgd", "optim.lr=1", "log_every=1"]
    for name, where in (("one", [*TINY, "nproc=1"]), ("two", [*CARDS, "nproc=2"])):
        done = exp(*where, *settings, f"output_dir={name}", **mine)
        assert done.returncode == 0, done.stderr
    assert exp.losses("two") == pytest.approx(exp.losses("one"), rel=1e-5)
    one, two = (
        torch.load(max((exp.path(name) / "checkpoints").glob("step_*.pth")), weights_only=True)["state_dict"]
        for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-6)


def test_a_transform_around_the_wrapper_is_refused(ranks):
    """It would go around the wrapper's averaging of gradients."""
    if not hasattr(torch, "func"):
        pytest.skip("torch.func came with torch 2.0")
    script = """
        import torch
        from torch.func import jacfwd
        from exp.engine.wrapper import wrap
        from exp.errors import RunError
        join()
        said = []
        for kind in ("mmddp", "ddp"):
            wrapped = wrap(torch.nn.Linear(3, 2), kind, {}, backend, torch.device("cpu"))
            assert wrapped(torch.ones(3)).shape == (2,)
            try:
                jacfwd(wrapped)(torch.ones(3))
            except RunError as error:
                said.append(str(error).split(";")[0])
            del wrapped
        backend.destroy_process_group()
        print(json.dumps(said))
    """
    for said in ranks(script, world_size=2):
        assert len(said) == 2
        assert all("is around the data-parallel wrapper" in line for line in said)
