"""UPerNet and DPT: shapes, and what they see."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from exp.errors import ConfigError
from exp.vision.dinov3 import SIZES, Segmenter
from exp.vision.dinov3.pyramid_heads import DptHead, blocks_of_levels

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
@pytest.mark.parametrize("size", [(16, 16), (33, 80)])
def test_any_size_and_every_parameter_has_a_gradient(head, size):
    model, given = segmenter(head, dropout=0.1).train(), batch(size)
    model.parse_losses(model(**given, mode="loss"))[0].backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert model(image=given["image"], mode="tensor").shape == (2, 3, *size)


@pytest.mark.parametrize("head", HEADS)
def test_each_of_the_four_blocks_and_for_dpt_the_cls_token_matters(head):
    model, image = segmenter(head).eval(), batch((48, 64))["image"]
    maps = []
    for features in model.features(image, [0, 1, 2, 3]):
        maps.append(features.patches.permute(0, 3, 1, 2))
        maps += [features.cls[:, :, None, None].expand_as(maps[-1])] * (head == "dpt")
    maps = torch.cat(maps, dim=1).detach().requires_grad_()
    scores = model.head(maps)
    torch.testing.assert_close(model(image=image), F.interpolate(scores, (48, 64), mode="bilinear"))
    (gradient,) = torch.autograd.grad(scores.square().sum(), maps)
    assert gradient.abs().sum(dim=(0, 2, 3)).min() > 0


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
        expected = {"head": head, "head_channels": 16, "head_norm": "group", "blocks": "<4 blocks>", **settings}
        assert {key: found[f"model.{key}"] for key in expected} == expected


def test_one_image_has_no_batch_statistics_of_pooled_features():
    model = segmenter("upernet", head_norm="batch")
    image = batch()["image"][:1]
    with pytest.raises(ConfigError, match="head_norm"):
        model.train()(image=image, mode="tensor")
