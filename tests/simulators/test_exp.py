"""exp on simulated cards of both generations: `backend=gcu backend.simulate=true`."""

from __future__ import annotations

import json

import pytest

from tests.conftest import TINY
from tests.simulators import needs_card, needs_current_card

SIMULATED = [*(setting for setting in TINY if setting != "backend=cpu"), "backend=gcu", "backend.simulate=true"]


@needs_card
@pytest.mark.slow
def test_cards_train_as_one_process_on_the_cpu(exp):
    # Drawn from each device's own generator, dropout would make other numbers.
    same = "dropout_by_sample=true"
    done = exp(*SIMULATED, "nproc=4", same, "output_dir=cards", SIM_GCU_STRICT="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("SIMULATED: no gcu card is used.")
    result = exp.result("cards")
    assert result["simulated"] is True
    assert result["process_group"] in ("cpu:gloo,gcu:eccl", "eccl")
    assert result["fallback"] is None
    assert [device["index"] for device in result["devices"]] == list(range(4))
    on_cpu = exp.train("cpu", same)
    assert on_cpu["simulated"] is False
    assert exp.losses("cards") == pytest.approx(exp.losses("cpu"), rel=1e-5)
    assert result["metrics"] == pytest.approx(on_cpu["metrics"], rel=1e-5)


LEAVES = """
import torch
from mmengine.hooks import Hook

class Leaves(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        for _ in range(1 + runner.rank):  # the second rank sends more
            torch.trunc(torch.ones(64, device=runner.device))

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        torch.trunc(torch.ones(64, device=runner.device))
"""


@needs_current_card
def test_a_run_tells_what_has_left_the_card_at_each_training_step(exp):
    (exp.folder / "leaves.py").write_text(LEAVES)
    done = exp(
        *SIMULATED, "nproc=2", "val_every=1", "plugins=[leaves]", "hooks=[{type: leaves.Leaves}]", "output_dir=run"
    )
    assert done.returncode == 0, done.stderr
    left = exp.result("run")["left_device"]
    assert left["rank"] == 1
    # A tensor of 256 bytes each way; what a validation sends is not counted.
    assert left["operators"]["trunc"] == {"calls_per_step": 2, "bytes_per_step": 1024}
    assert left["bytes_per_step"] == sum(each["bytes_per_step"] for each in left["operators"].values())
    assert f"left the device at each step, for the CPU and back: {left['calls_per_step']:.3g}x" in done.stdout
    lines = (exp.folder / "run" / "metrics.jsonl").read_text().splitlines()
    trained = [line for line in map(json.loads, lines) if line["split"] == "train"]
    assert {line["left_device_calls_per_step"] for line in trained} == {left["calls_per_step"] - 1}  # of rank 0
    most = exp.result("run")["memory_peak"]
    assert [line["memory_gib"] * 2**30 for line in trained][-1] == pytest.approx(max(most), rel=0.5)
    assert not any("utilisation_percent" in line for line in trained), "simulated cards have no monitor"


@needs_current_card
def test_what_is_not_known_is_null(exp):
    assert exp.train("cpu")["left_device"] is None
    assert "left_device" not in (exp.folder / "cpu" / "metrics.jsonl").read_text()


@needs_current_card
def test_a_resumed_run_restores_the_cards_random_state(exp):
    settings = [*SIMULATED, "nproc=2", "checkpoint.every_steps=2"]
    assert exp(*settings, "output_dir=whole", "checkpoint.keep_last=9").returncode == 0
    done = exp(*settings, "output_dir=half", "resume=whole/checkpoints/step_00000002.pth")
    assert done.returncode == 0, done.stderr
    assert exp.losses("half") == {4: exp.losses("whole")[4]}
    assert exp.result("half")["metrics"] == exp.result("whole")["metrics"]


@needs_current_card
def test_mixed_precision(exp):
    exp.train("whole")
    for precision in ("bf16", "fp16"):
        done = exp(*SIMULATED, f"precision={precision}", f"output_dir={precision}")
        assert done.returncode == 0, done.stderr
        assert exp.result(precision)["metrics"]["mse"] == pytest.approx(exp.result("whole")["metrics"]["mse"], rel=0.02)
        assert exp.losses(precision) != exp.losses("whole")


@needs_card
def test_more_processes_than_cards_are_refused(exp):
    done = exp(*SIMULATED, "nproc=4", SIM_GCU_COUNT="3")
    assert done.returncode == 3
    assert "nproc=4 asks for more devices than backend=gcu has here: 3" in done.stderr.splitlines()[0]


@pytest.mark.slow
def test_cards_are_simulated_only_when_asked_for(exp):
    done = exp(*TINY, "backend=auto", "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert exp.result("run")["backend"] == "cpu"
    assert exp.result("run")["simulated"] is False


@pytest.mark.parametrize(
    ("backend", "text"),
    [("auto", "say which backend's devices are to be simulated"), ("cpu", "there are no simulated devices of")],
)
def test_a_backend_without_simulated_devices_says_so(exp, backend, text):
    done = exp(*TINY, f"backend={backend}", "backend.simulate=true")
    assert done.returncode == 2
    assert text in done.stderr.splitlines()[0]


@needs_card
def test_without_a_compiler_it_says_what_to_install(exp, tmp_path):
    done = exp(*SIMULATED, SIM_GCU_CACHE=str(tmp_path / "empty"), CXX="no-such-compiler")
    assert done.returncode == 3
    assert "needs a C++ compiler: looked for no-such-compiler" in done.stderr.splitlines()[0]
    assert not exp.path("outputs").exists()
