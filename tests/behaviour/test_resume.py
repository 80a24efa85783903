"""A run that was interrupted is continued as if it had not been."""

from __future__ import annotations

import os

import pytest
import torch

from tests.behaviour.conftest import FORECAST, STEADY, first_line, losses, result, snapshot

HALF = "checkpoints/step_00000002.pth"
END = "checkpoints/step_00000004.pth"


def same(left, right, where="checkpoint"):
    """Both are equal, tensors bit for bit."""
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right)):
            same(one, other, f"{where}[{index}]")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    else:
        assert left == right, where


def weights(run, name=END):
    return torch.load(str(run / name), map_location="cpu")["state_dict"]


def test_the_second_half_is_bit_for_bit_that_of_the_straight_run(trained, exp):
    """With dropout: weights, optimizer, order of the data and random numbers go on where they were."""
    straight = trained("forecast")
    done = exp(*FORECAST, f"resume={straight / HALF}", "output_dir=half")
    assert done.returncode == 0, done.stderr
    half = exp.path("half")
    assert result(half)["resumed_from"].endswith("step_00000002.pth")
    assert losses(half) == {step: loss for step, loss in losses(straight).items() if step > 2}
    assert result(half)["metrics"] == result(straight)["metrics"]
    same(torch.load(str(straight / END)), torch.load(str(half / END)))


def test_another_number_of_ranks_goes_on_with_the_same_losses(trained, exp):
    straight = trained("steady")
    done = exp(*STEADY, "nproc=2", f"resume={straight / HALF}", "output_dir=half")
    assert done.returncode == 0, done.stderr
    assert losses(exp.path("half")) == pytest.approx({step: losses(straight)[step] for step in (3, 4)}, rel=1e-5)
    assert exp.result("half")["metrics"] == pytest.approx(result(straight)["metrics"], rel=1e-5)


def test_without_a_checkpoint_that_can_be_used_no_training_begins_in_silence(copy_of, exp):
    run = copy_of("forecast")
    for path in run.glob("checkpoints/step_*.pth"):
        path.write_bytes(path.read_bytes()[:1000])
    before = {path: size for path, (size, _) in snapshot(run).items()}
    done = exp(*FORECAST, "output_dir=run", "resume=auto")
    assert done.returncode == 2, done.stdout
    assert HALF.rpartition("/")[2] in first_line(done)
    assert {path: size for path, (size, _) in snapshot(run).items()} == before
    done = exp(*FORECAST, "output_dir=other", f"resume={run}")
    assert done.returncode == 2, done.stdout
    assert HALF.rpartition("/")[2] in first_line(done)


def test_what_a_resumed_run_does_again_is_recorded_once(copy_of, exp):
    run = copy_of("forecast")
    records, old = run / "metrics.jsonl", exp.path("old.jsonl")
    before = records.read_text()
    os.link(str(records), str(old))
    done = exp(*FORECAST, "output_dir=run", "resume=auto")
    assert done.returncode == 0, done.stderr
    assert records.read_text() == before
    assert old.read_text() == before  # the file was replaced, and never cut short where it lay
    assert not records.samefile(old)


def test_a_finished_run_is_never_overwritten_and_what_cannot_go_on_is_refused(trained, copy_of, exp):
    run = copy_of("forecast")
    before = snapshot(run)
    for words, key in (
        (["output_dir=run"], "run"),
        (["output_dir=run", "resume=auto", "global_batch_size=64", "max_steps=8"], "global_batch_size"),
        (["output_dir=new", "resume=nowhere"], "nowhere"),
        (["output_dir=new", f"resume={trained('scenes')}"], "scenes"),
    ):
        done = exp(*FORECAST, *words)
        assert done.returncode == 2, (words, done.stdout, done.stderr)
        assert key in first_line(done)
    assert snapshot(run) == before
    assert not exp.path("new").exists()


@pytest.mark.extended
@pytest.mark.parametrize("settings", [
    ["data.num_workers=2", "schedule=onecycle", "accumulate=2"],
    ["optim=sgd", "precision=bf16", "nproc=2"],
])  # fmt: skip
def test_variants_are_continued_exactly(exp, settings):
    exp.train("straight", *FORECAST, *settings)
    exp.train("half", *FORECAST, *settings, f"resume=straight/{HALF}")
    same(weights(exp.path("straight")), weights(exp.path("half")))
    assert exp.result("half")["metrics"] == exp.result("straight")["metrics"]


@pytest.mark.parametrize("name", [pytest.param("scenes", marks=pytest.mark.extended), "tiles"])
def test_augmented_images_are_continued_exactly(trained, exp, name):
    from tests.behaviour import conftest

    straight = trained(name)
    done = exp(*getattr(conftest, name.upper()), "nproc=1", f"resume={straight / HALF}", "output_dir=half")
    assert done.returncode == 0, done.stderr
    same(weights(straight), weights(exp.path("half")))
    assert exp.result("half")["metrics"] == result(straight)["metrics"]
