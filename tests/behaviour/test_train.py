"""Training through the command line: the same numbers however it is spread or split."""

from __future__ import annotations

import pytest

from tests.behaviour.conftest import STEADY, first_line, losses, result


@pytest.mark.parametrize("name", ["forecast", "scenes", "tiles"])
def test_a_training_leaves_its_result_losses_and_checkpoints(trained, name):
    run = trained(name)
    told = result(run)
    assert told["status"] == "completed"
    assert told["steps"] == 4
    assert max(losses(run)) == 4
    assert (run / "checkpoints" / "step_00000004.pth").stat().st_size > 0
    for file in ("config.yaml", "overrides.yaml", "env.json", "logs/rank0.log"):
        assert (run / file).is_file()


def test_two_ranks_and_micro_batches_compute_what_one_process_does(trained, exp):
    one = trained("steady")
    done = exp(*STEADY, "nproc=2", "accumulate=2", "output_dir=two")
    assert done.returncode == 0, done.stderr
    assert "global batch 32 = 8 x 2 processes x 2" in done.stdout
    two = exp.result("two")
    assert (two["world_size"], two["batch_size"], two["global_batch_size"]) == (2, 8, 32)
    assert len(two["devices"]) == 2
    assert losses(exp.path("two")) == pytest.approx(losses(one), rel=1e-5)
    assert two["metrics"] == pytest.approx(result(one)["metrics"], rel=1e-5)
    assert two["validation"] == pytest.approx(result(one)["validation"], rel=1e-5)
    assert "rank 1/2  local_rank 1" in (exp.path("two") / "logs" / "rank1.log").read_text()


@pytest.mark.extended
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_other_wrappers_compute_the_same(trained, exp, wrapper):
    done = exp(*STEADY, "nproc=2", f"wrapper={wrapper}", "output_dir=two")
    if wrapper == "fsdp" and done.returncode == 3:
        pytest.skip("this torch has no fsdp that exp uses")
    assert done.returncode == 0, done.stderr
    assert exp.result("two")["wrapper"] == wrapper
    assert losses(exp.path("two")) == pytest.approx(losses(trained("steady")), rel=1e-5)


def test_mixed_precision_and_clipping_train_nearly_the_same(trained):
    run = trained("forecast_bf16")
    assert result(run)["precision"] == "bf16"
    assert losses(run) == pytest.approx(losses(trained("forecast")), rel=0.02)
    assert losses(run) != losses(trained("forecast"))
    assert '"grad_norm"' in (run / "metrics.jsonl").read_text()


def test_a_loss_that_is_not_finite_fails_the_run_and_nothing_is_called_done(exp):
    done = exp(*STEADY, "optim.lr=1e30", "max_steps=8", "output_dir=run")
    assert done.returncode == 1
    assert "loss" in first_line(done)
    assert exp.result("run")["status"] == "failed"
    assert exp.result("run")["error"]["rank"] == 0
