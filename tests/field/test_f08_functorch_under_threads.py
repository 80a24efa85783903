"""F8: "Trying to access a forward AD level with an invalid index", then "cannot unpack non-iterable NoneType".

nn.DataParallel runs one thread per card in one process, and functorch's jacfwd and vmap keep their levels per process.

With exp there is one process per device, never DataParallel: a model that uses torch.func inside its forward pass
trains under DDP with the gradients of one process.
"""

from __future__ import annotations

import pytest
import torch

from tests.conftest import TINY

pytestmark = pytest.mark.skipif(not hasattr(torch, "func"), reason="torch.func came with torch 2.0")


def test_stock_threads_break_forward_mode_jacobians(stock):
    # What DataParallel does with its replicas: one thread for each.
    script = """
        import threading, torch
        from torch.func import jacfwd, vmap
        torch.set_num_threads(1)
        weight = torch.randn(16, 16)
        errors = []
        def replica():
            try:
                for _ in range(300):
                    vmap(jacfwd(lambda x: torch.tanh(weight @ x)))(torch.randn(8, 16))
            except RuntimeError as error:
                errors.append(str(error))
        threads = [threading.Thread(target=replica) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(errors[0] if errors else "no error")
    """
    (ended,) = stock(script)
    # Which of its errors comes first differs from run to run; sometimes the process does not survive it.
    assert "forward AD" in ended.printed or "level" in ended.printed or ended.returncode < 0, ended.printed


def test_exp_trains_it_as_one_process_does(exp, library):
    mine = library("""
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
    """)
    settings = [*TINY, "model._target_=mine.Jacobian", "log_every=1"]
    for name, nproc in (("one", 1), ("two", 2)):
        done = exp(*settings, f"nproc={nproc}", f"output_dir={name}", **mine)
        assert done.returncode == 0, done.stderr
    assert exp.losses("two") == pytest.approx(exp.losses("one"), rel=1e-5)
    assert exp.result("two")["metrics"] == pytest.approx(exp.result("one")["metrics"], rel=1e-5)
