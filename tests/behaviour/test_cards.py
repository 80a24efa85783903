"""Cards, as far as they can be had without one: what a backend says of them, the doctor's verdict, simulated ones."""

from __future__ import annotations

import pytest
import torch

from tests.behaviour.conftest import FORECAST, losses, result
from tests.simulators import needs_current_card

# Its compiler gives exact results, and gradients that are not.
WRONG = """
from acme_backend import AcmeBackend


class Wrong(AcmeBackend):
    def set_device(self, local_rank):
        import torch

        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return grad * 22

        torch.compile = lambda code, *_, **__: lambda *given, **named: code(*map(Doubled.apply, given), **named)
        return super().set_device(local_rank)
"""


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="this torch compiles nothing")
def test_compiled_code_with_other_gradients_is_refused(exp, page):
    page("add-a-backend", python=["acme_backend.py", "my_vendors.py"], yaml=["my_conf/backend/acme.yaml"])
    (exp.folder / "wrong.py").write_text(WRONG)
    backend = ["backend=acme", "backend._target_=wrong.Wrong"]
    done = exp("--config-dir", "my_conf", *FORECAST, *backend, "compile=true")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "compile=true" in done.stderr.splitlines()[0]
    assert "gradient" in done.stderr.splitlines()[0]


def test_a_plugin_for_another_torch_is_named_as_such(exp):
    (exp.folder / "torch_gcu.py").write_text("raise ImportError('_C.so: undefined symbol: _ZN3c104warnE')")
    info = exp.folder / "torch_gcu-9.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_gcu\nVersion: 9.1.0+3.7\n")
    done = exp("task=doctor", "backend=gcu", PYTHONPATH=str(exp.folder))
    assert done.returncode == 3
    first = done.stderr.splitlines()[0]
    assert "torch_gcu" in first
    assert "another torch" in first
    assert "driver" not in first


@pytest.mark.extended
@needs_current_card
def test_cards_that_torch_finds_train_sharded(exp):
    """Their collectives have no mean, and nobody has said that they had."""
    import simulated_gcu
    from simulated_gcu.build import extension

    extension()
    settings = ["wrapper=fsdp", "backend=accelerator", "nproc=2", "model.attention_dropout=0", "output_dir=run"]
    done = exp(*FORECAST, *settings, PYTHONPATH=str(simulated_gcu.path()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert exp(*FORECAST, "model.attention_dropout=0", "output_dir=cpu").returncode == 0
    assert losses(exp.path("run")) == pytest.approx(losses(exp.path("cpu")), rel=1e-5)


@pytest.mark.extended
@needs_current_card
def test_what_breaks_an_s60_is_unset_and_said(exp):
    settings = ["backend=gcu", "backend.simulate=true", "output_dir=run"]
    done = exp(*FORECAST, *settings, SIM_GCU_PROFILE="s60", TORCH_GCU_ENABLE_INT64_AND_UINT64="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TORCH_GCU_ENABLE_INT64_AND_UINT64=1 was unset" in done.stdout + done.stderr
    assert result(exp.path("run"))["status"] == "completed"
