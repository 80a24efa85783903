"""compile=true gives the numbers, names and files of a run without."""

from __future__ import annotations

import pytest
import torch

from exp.hardware.compat import supports_compilation, supports_full_sharding

MODEL = """
import torch
from exp.models.base import Model

class Mlp(Model):
    def __init__(self, lookback, horizon, **_):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(lookback, 8), torch.nn.GELU(), torch.nn.Linear(8, horizon))

    def forward(self, x, y=None, mode="tensor", **_):
        outputs = self.layers(x.transpose(1, 2)).transpose(1, 2)
        return {"loss": (outputs - y).square().mean()} if mode == "loss" else outputs
"""

needs_compilation = pytest.mark.skipif(not supports_compilation(), reason="torch 2.3 compiles in place")


@needs_compilation
def test_a_compiled_run_is_as_another_and_goes_on_uncompiled(exp):
    def train(name, *arguments):
        """Gives the number of matrix products in what torch has compiled so far."""
        own = {"TORCHINDUCTOR_CACHE_DIR": str(exp.folder / "compiled"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        exp.train(name, "model._target_=mine.Mlp", "log_every=1", *arguments, **own)
        return sum("addmm" in file.read_text() for file in exp.folder.glob("compiled/**/*.py"))

    (exp.folder / "mine.py").write_text(MODEL)
    before = train("eager")
    assert before == 0
    for wrapper in ["ddp", *["fsdp"] * supports_full_sharding()]:
        compiled = train(wrapper, "max_steps=2", "nproc=2", f"wrapper={wrapper}", "compile=true")
        assert compiled > before
        train(wrapper, "resume=auto")
        assert exp.losses(wrapper) == pytest.approx(exp.losses("eager"), rel=1e-5)
        assert exp.result(wrapper)["changed_on_resume"]["compile"] == {"old": True, "new": False}
        before = compiled
    saved = torch.load(str(exp.path("ddp") / "checkpoints" / "best.pth"), map_location="cpu")["state_dict"]
    assert list(saved) == [f"layers.{number}.{kind}" for number in (0, 2) for kind in ("weight", "bias")]
