from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from exp.vision.backbones.vit import VisionTransformer
from exp.vision.backbones.vit_weights import SIZES
from exp.vision.models import SceneClassifier
from tests.vision.parts import vit

TINY = {"size": "tiny", "embed_dim": 32, "depth": 3, "num_heads": 2, "layer_scale_init": 0.5}
# Published parameter counts (arXiv 2508.10104, table of the family), in millions.
PUBLISHED = {"vits16": 21.6, "vits16plus": 29, "vitb16": 86, "vitl16": 300, "vith16plus": 840, "vit7b16": 6716}


def tiny(**settings):
    torch.manual_seed(0)
    return VisionTransformer(**TINY, **settings)


def num_parameters(size):
    """Of a backbone of this size; that the layers are these is seen beside transformers' own."""
    dim, hidden = size.embed_dim, size.hidden_dim
    feed_forward = (2 * (dim + 1) * hidden if size.gated else (dim + 1) * hidden) + (hidden + 1) * dim
    per_block = (dim + 1) * 3 * dim + (dim + 1) * dim + feed_forward + 6 * dim
    return size.depth * per_block + 3 * 16 * 16 * dim + dim + 5 * dim + 2 * dim


def test_parameters_are_as_many_as_published():
    for name, millions in PUBLISHED.items():
        assert num_parameters(SIZES[name]) / 1e6 == pytest.approx(millions, rel=0.015)


def test_any_image_size_and_any_blocks_in_their_order():
    model, image = tiny().eval(), torch.randn(1, 3, 33, 5)
    features = model(image, out_indices=[2, 0])
    (last, first), (last_cls, first_cls) = features.maps, features.cls
    assert last.shape == first.shape == (1, 32, 3, 1)
    torch.testing.assert_close(model(F.pad(image, (0, 11, 0, 15))).maps[0], last)
    torch.testing.assert_close(first_cls, model(image, out_indices=[0]).cls[0])
    assert not torch.allclose(first_cls, last_cls)


@pytest.mark.parametrize(("freeze", "trainable"), [("none", 3), ("all", 0), ("1", 2)])
def test_frozen_blocks(freeze, trainable):
    whole = SceneClassifier(3, freeze=freeze, backbone=vit(**TINY, drop_path_rate=0.9)).train()
    model = whole.backbone
    moving = {name.split(".")[1] for name, p in model.named_parameters() if p.requires_grad and "blocks" in name}
    assert len(moving) == trainable
    assert model.patch_embed.proj.weight.requires_grad is model.cls_token.requires_grad is (freeze == "none")
    image = torch.randn(1, 3, 32, 32)
    first, second = (model(image).maps[0] for _ in range(2))
    assert first.requires_grad is model.norm.weight.requires_grad is (freeze != "all")
    if freeze == "all":  # nothing is dropped in what stays as it is
        assert torch.equal(first, second)


def test_drop_path_keeps_the_mean():
    image = torch.randn(1, 3, 32, 32)
    plain = tiny().eval()(image).maps[0]
    dropping = tiny(drop_path_rate=0.5)
    torch.testing.assert_close(dropping.eval()(image).maps[0], plain)
    block = dropping.blocks[2]  # 0.5 in the last, 0 in the first
    tokens, table = torch.randn(1, 5, 32).expand(2000, -1, -1), torch.zeros(5, 8)
    with torch.no_grad():
        both = block.eval()(tokens[:1], table + 1, table) - tokens[:1]
        some = block.train()(tokens, table + 1, table) - tokens
    assert some.flatten(1).any(1).float().mean().item() == pytest.approx(0.75, abs=0.05)
    torch.testing.assert_close(some.mean(0, keepdim=True), both, rtol=0.2, atol=0.2 * both.abs().max().item())
