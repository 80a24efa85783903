"""Low-rank updates and heads over four blocks, as docs/guide/tuning.md says."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.behaviour.conftest import SCENES, TILES, losses, result
from tests.simulators import needs_current_card

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
LORA = ["model.lora.rank=2", "model.lora.dropout=0.1", "optim.lr=1e-2"]
LOSSES = ",".join(f"{{_target_: exp.vision.losses.{name}}}" for name in ("CrossEntropy", "Lovasz", "Focal"))
DPT = [
    *TILES,
    "model.backbone.depth=4",
    "model/head=dpt",
    "model.head.norm=group",
    "model.head.dropout=0.1",
    f"model.losses=[{LOSSES}]",
]
UPERNET = [*DPT, "model/head=upernet"]


def run(exp, name, *settings, **environment):
    done = exp(*settings, f"output_dir={name}", **environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return exp.path(name)


def state(folder, file="step_00000004.pth"):
    return torch.load(str(folder / "checkpoints" / file))["state_dict"]


def resumed(exp, name, *settings):
    """The run again, from its second step to its end."""
    shutil.copytree(exp.path(name) / "checkpoints", exp.path("rest") / "checkpoints")
    (exp.path("rest") / "checkpoints" / "step_00000004.pth").unlink()
    return run(exp, "rest", *settings, "resume=auto")


def test_low_rank_updates_are_all_that_is_trained_and_merged_by_who_has_none(exp):
    folder = run(exp, "run", *SCENES, *LORA, "val_every=4")
    found = result(folder)
    first, last = state(folder, "step_00000002.pth"), state(folder)
    changed = {key for key, value in last.items() if not torch.equal(value, first[key])}
    updates = {key for key in last if ".lora." in key and last[key].dim()}
    assert changed == updates | {"head.weight", "head.bias"}
    assert found["trained_parameters"] == sum(last[key].numel() for key in changed)
    assert found["parameters"] > 2 * found["trained_parameters"]
    plain = run(exp, "plain", "task=eval", "init_from=run", "model.lora.rank=0", "plots=false", "backend=cpu")
    assert result(plain)["metrics"] == pytest.approx(found["metrics"], abs=1e-6)


KINDS = {"lora": [*SCENES, *LORA], "dpt": DPT, "upernet": UPERNET,
         "dpt and updates": [*DPT, "model.lora.rank=2", "model.lora.dropout=0.1"]}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["dpt and updates", "upernet"])
def test_trainings_of_all_kinds_resume_bit_for_bit(exp, kind):
    run(exp, "run", *KINDS[kind])
    resumed(exp, "run", *KINDS[kind])
    again = state(exp.path("rest"))
    assert [key for key, value in state(exp.path("run")).items() if not torch.equal(value, again[key])] == []


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "where"),
    [("lora", []), ("lora", ["wrapper=fsdp"]), ("dpt", ["wrapper=fsdp"]), ("upernet", [])],
)
def test_two_processes_compute_what_one_does(exp, kind, where):
    if where and TORCH < (2, 7):
        pytest.skip("fsdp takes torch >= 2.7")
    settings = [*KINDS[kind], "model.head.dropout=0" if kind in ("dpt", "upernet") else "model.dropout=0"]
    settings += ["model.lora.dropout=0"] if kind == "lora" else []
    alone, both = run(exp, "alone", *settings), run(exp, "both", *settings, "nproc=2", *where)
    assert losses(both) == pytest.approx(losses(alone), rel=1e-5)
    assert result(both)["trained_parameters"] == result(alone)["trained_parameters"]


@pytest.mark.extended
@needs_current_card
@pytest.mark.parametrize("kind", ["dpt", "upernet"])
def test_no_step_leaves_the_card(exp, kind):
    card = {"SIM_GCU_PROFILE": "s60", "SIM_GCU_STRICT": "1"}
    folder = run(exp, "card", *KINDS[kind], "backend=gcu", "backend.simulate=true", **card)
    assert result(folder)["cpu_fallbacks"] == {"rank": 0, "calls_per_step": 0, "bytes_per_step": 0, "operators": {}}
