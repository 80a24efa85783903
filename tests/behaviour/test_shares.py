"""Ranks with unequal parts of a batch (``launcher.share``, ``launcher.shares``) compute what one rank does."""

from __future__ import annotations

import json

import pytest

from tests.behaviour.conftest import FORECAST, STEADY, TILES, first_line, losses, ran, result
from tests.behaviour.test_plain import L1, NET, PLAIN
from tests.conftest import free_port

# Dropout by sample, clipping in every step, two micro-batches, and a validation within the interval of a line.
EXACT = [*FORECAST, "dropout_by_sample=true", "optim.clip_grad_norm=0.05", "log_every=4"]


def agrees(run, reference):
    assert losses(run) == pytest.approx(losses(reference), rel=1e-6)
    assert result(run)["metrics"] == pytest.approx(result(reference)["metrics"], rel=1e-6)


def test_any_shares_train_clip_drop_and_resume_as_one_rank(exp):
    ran(exp, *EXACT, "output_dir=one", "accumulate=2")
    told = ran(exp, *EXACT, "output_dir=two", "accumulate=2", "nproc=2", "launcher.shares=[3,1]").stdout
    assert "global batch 32 over 2 processes by their shares" in told
    ran(exp, *EXACT, "output_dir=three", "nproc=3", "launcher.shares=[5,1,0.1]",
        "resume=two/checkpoints/step_00000002.pth")  # fmt: skip
    for name, batch, shares in (("two", 12, [3, 1]), ("three", 26, [5, 1, 0.1])):
        agrees(exp.path(name), exp.path("one"))
        assert exp.result(name)["batch_size"] == batch
        assert [device["share"] for device in exp.result(name)["devices"]] == shares
    lines = [(exp.path(name) / "metrics.jsonl").read_text().splitlines() for name in ("one", "two", "three")]
    norms = [[record["grad_norm"] for record in map(json.loads, each) if "grad_norm" in record] for each in lines]
    assert norms == [pytest.approx(norms[0], rel=1e-5)] * 3


@pytest.mark.extended
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_family_a_wrapper_and_a_plain_module_each(exp, trained, wrapper):
    (exp.folder / "my_net.py").write_text(NET)
    if wrapper == "fsdp":
        done = exp(*STEADY, "nproc=3", "launcher.shares=[1,2,5]", "wrapper=fsdp", "output_dir=forecast")
        if done.returncode == 3:
            pytest.skip("this torch has no fsdp that exp uses")
        agrees(exp.path("forecast"), trained("steady"))
        return
    ran(exp, *TILES, "nproc=2", "launcher.shares=[1,5]", "output_dir=tiles")  # with ignored pixels
    agrees(exp.path("tiles"), trained("tiles"))
    ran(exp, *PLAIN, L1, "output_dir=one")
    ran(exp, *PLAIN, L1, "nproc=3", "launcher.shares=[1,30,2]", "output_dir=three")
    agrees(exp.path("three"), exp.path("one"))


def test_each_node_has_its_own_share_and_speed_proposes_them(exp, start, trained):
    job = ["launcher.nnodes=2", f"launcher.rdzv_endpoint=127.0.0.1:{free_port()}", "output_dir=run"]
    nodes = [start(*STEADY, *job, f"launcher.share={share}") for share in (1, 3)]
    said = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    agrees(exp.path("run"), trained("steady"))
    assert sorted(device["share"] for device in exp.result("run")["devices"]) == [1, 3]
    ran(exp, *STEADY, "task=speed", "task.warm_up=1", "max_steps=3", "nproc=2", "launcher.shares=[3,1]", "output_dir=s")
    (shares,) = exp.result("s")["shares"]
    assert min(shares) == 1.0
    assert all(speed > 0 for speed in exp.result("s")["compute_samples_per_second"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nproc=2", "launcher.shares=[1,2,3]"], "launcher.shares=[1.0, 2.0, 3.0] has 3 weights for nproc=2"),
        (["nproc=2", "launcher.shares=[1,0]"], "launcher.shares has 0.0"),
        (["launcher.share=1", "launcher.shares=[1]"], "launcher.share and launcher.shares"),
        (["nproc=2", "launcher.share=1", "batch_size=8", "accumulate=2"], "global_batch_size=32"),
        (["nproc=2", "launcher.share=1", "global_batch_size=33", "accumulate=2"], "32 or 34"),
        (["nproc=2", "launcher.share=1", "global_batch_size=1"], "2 or 3"),
    ],
)
def test_shares_that_cannot_be_are_refused_by_key(exp, words, named):
    done = exp("backend=cpu", *words, "output_dir=run")
    assert done.returncode == 2, done.stderr
    assert named in first_line(done)
