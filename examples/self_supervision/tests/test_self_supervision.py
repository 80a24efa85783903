"""The installed example: views, two networks, losses, resuming, and what others do with its weights."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
import torch

from tests.simulators import needs_current_card

# Small pictures and a small network: a run takes seconds.
TINY = [
    "experiment=self_supervision", "backend=cpu", "model.backbone.depth=2", "model.backbone.embed_dim=24",
    "model.backbone.num_heads=2", "data.size=32", "data.global_size=32", "data.local_size=16", "data.local_views=2",
    "model.prototypes=32", "model.hidden=16", "model.bottleneck=8", "model.koleo_group=2", "model.gram_weight=1",
    "global_batch_size=8", "schedule.warmup_steps=1", "max_epochs=null", "max_steps=4", "val_every=2", "log_every=1",
    "debug.eval_batches=1", "plots=false",
]  # fmt: skip


def losses(exp, name):
    lines = [json.loads(line) for line in (exp.path(name) / "metrics.jsonl").read_text().splitlines()]
    return [[line[f"loss_{part}"] for part in ("dino", "ibot", "koleo", "gram")]
            for line in lines if line["split"] == "train"]  # fmt: skip


def state(exp, name, step=4):
    return torch.load(str(exp.path(name) / "checkpoints" / f"step_{step:08d}.pth"))["state_dict"]


def test_losses_do_not_depend_on_ranks_and_a_run_resumes_with_its_teacher(run, exp):
    run(*TINY, "output_dir=one", "checkpoint.every_steps=2")
    run(*TINY, "output_dir=two", "nproc=2")
    np.testing.assert_allclose(losses(exp, "two"), losses(exp, "one"), rtol=2e-4, atol=1e-6)
    trained = state(exp, "one")
    assert {name.partition(".")[0] for name in trained} >= {"backbone", "student", "anchor", "teacher_heads"}
    for name, value in trained.items():
        torch.testing.assert_close(state(exp, "two")[name], value, rtol=1e-3, atol=1e-5)
    weight = "blocks.0.mlp.fc1.weight"
    first, teacher, student = (trained[f"{part}.{weight}"] for part in ("anchor", "backbone", "student"))
    assert 0 < (teacher - first).abs().max() < (student - first).abs().max()  # the teacher follows
    run(*TINY, "output_dir=half", "resume=one/checkpoints/step_00000002.pth")
    assert all(torch.equal(value, trained[name]) for name, value in state(exp, "half").items())
    run(*TINY, "output_dir=odd", "model.koleo_group=3", code=2)


def test_given_weights_are_continued_and_others_start_from_the_teacher(run, exp):
    scenes = ["experiment=dinov3_eurosat", *TINY[1:6], "global_batch_size=8", "max_epochs=null", "max_steps=1",
              "debug.eval_batches=1", "plots=false"]  # fmt: skip
    run(*scenes, "output_dir=scenes")
    run(*TINY, "init_from=scenes", "max_steps=1", "output_dir=more")
    given, continued = state(exp, "scenes", 1), state(exp, "more", 1)
    name = "blocks.1.attn.proj.weight"
    assert torch.equal(continued[f"anchor.{name}"], given[f"backbone.{name}"])
    assert 0 < (continued[f"student.{name}"] - given[f"backbone.{name}"]).abs().max() < 1e-2
    run("task=features", "init_from=more", "data=eurosat", "data.size=32", "backend=cpu", "task.store=store",
        "output_dir=features")  # fmt: skip
    assert len(set(np.load(str(exp.path("store") / "train_labels.npy")).tolist())) == 10  # a probe has labels
    assert np.load(str(exp.path("store") / "train_cls.npy")).shape[1] == 24
    run(*scenes, "model.freeze=all", "init_from=more", "output_dir=probe")
    assert torch.equal(state(exp, "probe", 1)[f"backbone.{name}"], continued[f"backbone.{name}"])


@needs_current_card
def test_no_operator_leaves_the_card(run, exp, monkeypatch):
    monkeypatch.setenv("SIM_GCU_STRICT", "1")
    run(*[word for word in TINY if word != "backend=cpu"], "backend=gcu", "backend.simulate=true", "nproc=2",
        "max_steps=1", "output_dir=card")  # fmt: skip
    assert exp.result("card")["cpu_fallbacks"]["calls_per_step"] == 0


def test_losses_by_hand(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    losses = importlib.import_module("self_supervision.losses")
    shares = losses.sinkhorn(torch.randn(64, 4) * 0.2, 0.1, lambda value: value, steps=20)
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(64))
    torch.testing.assert_close(shares.sum(dim=0), torch.full((4,), 16.0), rtol=1e-3, atol=1e-3)
    target = torch.tensor([[0.25, 0.75]])
    entropy = -(0.25 * np.log(0.5) + 0.75 * np.log(0.5))
    assert float(losses.cross_entropy(target, torch.zeros(1, 2), 0.1)) == pytest.approx(entropy)
    square = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    assert float(losses.koleo(square, 4)) == pytest.approx(-np.log(2**0.5), rel=1e-4)
    both = torch.cat([square, 3.0 * square[[0, 2, 1, 3]]])
    assert float(losses.koleo(both, 4)) == pytest.approx(float(losses.koleo(square, 4)))
    patches = torch.randn(2, 5, 3)
    turn = torch.linalg.qr(torch.randn(3, 3))[0]
    assert float(losses.gram_distance(patches @ turn * 2.0, patches)) == pytest.approx(0.0, abs=1e-10)
    assert float(losses.gram_distance(square[None, :2], square[None, [0, 2]])) == pytest.approx(0.5)


def test_rank_of_features_shows_a_collapse(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    data = importlib.import_module("self_supervision.data")
    distributed = importlib.import_module("exp.distributed").Distributed()
    found = []
    for features in (torch.eye(8).repeat(4, 1), torch.ones(32, 8)):
        metric = data.EffectiveRank()
        metric.reset()
        for part in features.split(5):
            metric.update(part, {})
        found.append(metric.compute(distributed)["effective_rank"])
    assert found == pytest.approx([8.0, 1.0], rel=1e-3)
