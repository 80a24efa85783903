"""UPerNet and DPT: shapes, what they see; and that trainings with them resume, spread and stay on the card."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from exp.compat import supports_full_sharding
from exp.errors import ConfigError
from exp.vision.dinov3 import SIZES, Segmenter
from exp.vision.dinov3.pyramid_heads import DptHead, blocks_of_levels
from tests.conftest import run_exp
from tests.simulators import needs_current_card

SMALL = {"embed_dim": 32, "depth": 4, "num_heads": 2, "layer_scale": 0.5}
HEADS = ("upernet", "dpt")


def segmenter(head, **settings):
    torch.manual_seed(0)
    return Segmenter(3, **{**SMALL, "head_channels": 16, "head_norm": "group", "head": head, **settings})


def batch(size=(40, 56)):
    torch.manual_seed(1)
    image = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)
    return {"image": image, "label": torch.randint(0, 3, (2, *size)).to(torch.uint8)}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("size", [(40, 56), (16, 16), (33, 80)])
def test_any_size_and_every_parameter_has_a_gradient(head, size):
    model = segmenter(head, dropout=0.1).train()
    assert model.blocks == [0, 1, 2, 3]
    given = batch(size)
    model.parse_losses(model(**given, mode="loss"))[0].backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert model(image=given["image"], mode="tensor").shape == (2, 3, *size)


@pytest.mark.parametrize(("head", "cells"), [("upernet", 4), ("dpt", 8)])
def test_scores_are_finer_than_patches(head, cells):
    model = segmenter(head).eval()
    image = batch((32, 48))["image"]
    with torch.no_grad():
        assert model._scores(model.features(image, model.blocks)).shape == (2, 3, 2 * cells, 3 * cells)


@pytest.mark.parametrize("head", HEADS)
def test_each_of_the_four_blocks_and_for_dpt_the_cls_token_matters(head):
    model = segmenter(head).eval()
    with torch.no_grad():
        found = model.features(batch()["image"], model.blocks)
        whole = model._scores(found)
        for features in found:
            for part in ("patches", "cls"):
                before = getattr(features, part)
                setattr(features, part, torch.randn_like(before))
                changed = not torch.equal(model._scores(found), whole)
                setattr(features, part, before)
                assert changed is (part == "patches" or head == "dpt")


def test_blocks_are_the_ends_of_four_parts():
    assert [blocks_of_levels(depth) for depth in (2, 4, 12, 24, 40)] == [
        [0, 0, 1, 1], [0, 1, 2, 3], [2, 5, 8, 11], [5, 11, 17, 23], [9, 19, 29, 39],
    ]  # fmt: skip
    assert segmenter("dpt", blocks=[0, 0, 1, -1]).blocks == [0, 0, 1, 3]


def test_channels_of_dpt_are_the_paper_s():
    head = DptHead(SIZES["vitb16"].embed_dim, 150)
    assert [layer.out_channels for layer in head.project] == [96, 192, 384, 768]
    assert {layer.out_channels for layer in head.enter} == {256}


def test_weights_tell_their_head():
    for head, settings in (("upernet", {}), ("dpt", {}), ("dpt", {"reassemble_channels": [4, 8, 8, 16]})):
        model = segmenter(head, **settings)
        found = model.settings_of(model.state_dict())
        assert (found["model.head"], found["model.head_channels"], found["model.head_norm"]) == (head, 16, "group")
        assert found["model.blocks"] == "<4 blocks>"
        assert found.get("model.reassemble_channels") == settings.get("reassemble_channels")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "upernet", "blocks": [1, 3]}, "model.head=upernet sees 4 blocks, but model.blocks names 2"),
        ({"head": "dpt", "reassemble_channels": [8, 8]}, r"reassemble_channels=\[8, 8\] must be 4 numbers"),
        ({"head": "upernet", "reassemble_channels": [8] * 4}, "is for model.head=dpt, not upernet"),
        ({"head": "uper"}, "model.head=uper is not one of linear, upsample, upernet, dpt; did you mean 'upernet'"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        Segmenter(3, **SMALL, **settings)


def test_one_image_has_no_batch_statistics_of_pooled_features():
    model = segmenter("upernet", head_norm="batch")
    image = batch()["image"][:1]
    with pytest.raises(ConfigError, match=r"set model\.head_norm=group, or batch_size=2 or more"):
        model.train()(image=image, mode="tensor")
    model.eval()(image=image, mode="tensor")


# -- through the command line ------------------------------------------------------------------------------------------

TILES = [
    "experiment=dinov3_dubai", "model.embed_dim=16", "model.depth=4", "model.num_heads=2", "model.head_channels=16",
    "model.window=256", "data.size=64", "global_batch_size=4", "max_epochs=null", "max_steps=3", "val_every=3",
    "log_every=1", "schedule.warmup_steps=1", "checkpoint.every_steps=1", "checkpoint.keep_last=9", "plots=false",
    "data.parts={train:['tile[1-2]/*_00[1-3].*'],val:['tile5/*_008.*']}", "debug.val_batches=1", "debug.test_batches=1",
    "model.dropout=0.1", "model.lovasz_weight=1", "model.focal_weight=1",
]  # fmt: skip


def trained(folder, head, name, *settings, **environment):
    done = run_exp(folder, *TILES, f"model.head={head}", f"output_dir={name}", *settings, **environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["split"] == "train"]


@pytest.mark.parametrize("head", HEADS)
def test_a_training_resumes_bit_for_bit(tmp_path, head):
    whole = trained(tmp_path, head, "whole", "backend=cpu")
    assert len(whole) == 3
    shutil.copytree(tmp_path / "whole" / "checkpoints", tmp_path / "rest" / "checkpoints")
    (tmp_path / "rest" / "checkpoints" / "step_00000003.pth").unlink()
    trained(tmp_path, head, "rest", "backend=cpu", "resume=auto")
    ends = [torch.load(tmp_path / name / "checkpoints" / "step_00000003.pth") for name in ("whole", "rest")]
    for key, value in ends[0]["state_dict"].items():
        assert torch.equal(value, ends[1]["state_dict"][key]), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "where"),
    [
        ("upernet", ["nproc=2"]),
        pytest.param(
            "dpt", ["nproc=2", "wrapper=fsdp"], marks=pytest.mark.skipif(not supports_full_sharding(), reason="torch")
        ),
    ],
)
def test_two_processes_compute_what_one_does(tmp_path, head, where):
    alone = trained(tmp_path, head, "alone", "backend=cpu", "model.dropout=0")
    both = trained(tmp_path, head, "both", "backend=cpu", "model.dropout=0", *where)
    assert both == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@needs_current_card
@pytest.mark.parametrize("head", HEADS)
def test_no_step_leaves_the_card(tmp_path, head):
    card = {"SIM_GCU_PROFILE": "s60", "SIM_GCU_STRICT": "1"}
    trained(tmp_path, head, "card", "backend=gcu", "backend.simulate=true", **card)
    left = json.loads((tmp_path / "card" / "result.json").read_text())["left_device"]
    assert left == {"rank": 0, "calls_per_step": 0, "bytes_per_step": 0, "operators": {}}
