"""Failures that users met on servers with cards, as far as no other file here has them.

Placement (F1, F4), groups by guessing (F5 to F7, F14), busy and idle cards (F9), memory (F16), batch norm (F17) and
precision (F21): test_simulated. Errors swallowed, stray ranks, ends (F3, F18, F22): test_end. Ports and variables (F10,
F11): test_launch. Batches and shards (F13, F15): test_train, test_evaluate. Checking (F19): test_machine. Data (F20):
test_traps.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.behaviour.conftest import STEADY, losses


def test_f2_f4_the_wrapper_gets_what_the_configuration_says_and_ranks_report_their_parameters(exp):
    (exp.folder / "mine.py").write_text(
        "import json\nfrom mmengine.hooks import Hook\n\n\nclass Look(Hook):\n    def before_train(self, runner):\n"
        "        names = 'find_unused_parameters', 'bucket_bytes_cap', 'gradient_as_bucket_view'\n"
        "        found = [getattr(runner.model, name) for name in names]\n"
        "        open(f'seen{runner.rank}.json', 'w').write(json.dumps(found))\n"
    )
    options = ["wrapper.find_unused_parameters=true", "wrapper.bucket_cap_mb=7", "report_placement=true",
               "+wrapper.options.gradient_as_bucket_view=false"]  # fmt: skip
    done = exp(*STEADY, "max_steps=1", "nproc=2", *options, "hooks=[{type: mine.Look}]", "plugins=[mine]",
               "output_dir=run")  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert json.loads((exp.folder / f"seen{rank}.json").read_text()) == [True, 7 * 2**20, False]
        log = (exp.path("run") / "logs" / f"rank{rank}.log").read_text()
        assert f"placement: rank {rank}  local_rank {rank}  world_size 2  device cpu" in log
        assert ", shape (" in log
    config = (exp.path("run") / "config.yaml").read_text()
    assert "bucket_cap_mb: 7" in config
    assert "${" not in config


@pytest.mark.extended
@pytest.mark.skipif(not hasattr(torch, "func"), reason="torch.func came with torch 2.0")
def test_f8_models_that_use_function_transforms_train_under_ddp_as_in_one_process(exp):
    (exp.folder / "mine.py").write_text("""
import torch
from torch.func import jacfwd, vmap
from exp.models.base import Model
class Jacobian(Model):
    def __init__(self, channels, lookback, horizon, **_):
        super().__init__()
        self.short, self.horizon = torch.nn.Linear(lookback, 4), torch.nn.Linear(4, horizon)
        self.steer = torch.nn.Linear(4, 4)
    def forward(self, x, y, mode="loss", **_):
        latent = self.short(x.transpose(1, 2)).flatten(0, 1)
        slopes = vmap(jacfwd(lambda z: torch.tanh(self.steer(z))))(latent)
        bent = (slopes @ latent.unsqueeze(-1)).squeeze(-1)
        forecast = self.horizon(latent + bent).unflatten(0, x.shape[::2]).transpose(1, 2)
        return forecast if mode == "predict" else {"loss": (forecast - y).square().mean()}
""")
    for name, more in (("one", []), ("two", ["nproc=2"])):
        done = exp(*STEADY, "model._target_=mine.Jacobian", *more, f"output_dir={name}")
        assert done.returncode == 0, done.stderr
    assert losses(exp.path("one")) == pytest.approx(losses(exp.path("two")), rel=1e-5)


NOTES = """
import os, time
from pathlib import Path
notes = Path(os.environ["NOTES"])
with notes.open("a") as file:
    print(os.environ.get("MINE"), os.environ.get("OMP_NUM_THREADS"), file=file)
deadline = time.monotonic() + 60
while str(os.getpid()) == os.environ.get("EXP_AGENT_PID") and notes.read_text().count("\\n") < 2:
    assert time.monotonic() < deadline  # for the fork server, which ends with its agent
    time.sleep(0.05)
raise ImportError("noted")
"""


def test_f12_torch_finds_the_environment_of_the_backend_in_every_process_of_a_run(exp):
    """A torch that only notes how it found the environment stands before the real one."""
    (exp.folder / "lib").mkdir()
    (exp.folder / "lib" / "torch.py").write_text(NOTES)
    for nproc in (1, 2):
        notes = exp.folder / f"notes{nproc}"
        done = exp(*STEADY, f"nproc={nproc}", "backend.env={MINE: quiet, OMP_NUM_THREADS: 7}", f"output_dir=run{nproc}",
                   fresh=True, PYTHONPATH=str(exp.folder / "lib"), NOTES=str(notes), OMP_NUM_THREADS="5")  # fmt: skip
        assert done.returncode in (1, 3), done.stderr
        assert {*notes.read_text().splitlines()} == {"quiet 5"}  # what the user exports wins
