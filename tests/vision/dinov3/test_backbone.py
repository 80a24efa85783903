from __future__ import annotations

import dataclasses

import pytest
import torch

from exp.errors import ConfigError
from exp.vision.dinov3.backbone import VisionTransformer
from exp.vision.dinov3.sizes import SIZES

TINY = dataclasses.replace(SIZES["tiny"], embed_dim=32, depth=3, num_heads=2, hidden_dim=64)
# Published parameter counts (arXiv 2508.10104, table of the family), in millions.
PUBLISHED = {"vits16": 21.6, "vits16plus": 29, "vitb16": 86, "vitl16": 300, "vith16plus": 840, "vit7b16": 6716}


def tiny(**settings):
    torch.manual_seed(0)
    return VisionTransformer(TINY, layer_scale=0.5, **settings)


def num_parameters(size):
    """Of a backbone of this size, by a formula that holds for a small one."""
    block = VisionTransformer(dataclasses.replace(size, embed_dim=64, num_heads=4, hidden_dim=128, depth=1)).blocks[0]
    dim, hidden = size.embed_dim, size.hidden_dim
    feed_forward = (2 * (dim + 1) * hidden if size.gated else (dim + 1) * hidden) + (hidden + 1) * dim
    per_block = (dim + 1) * 3 * dim + (dim + 1) * dim + feed_forward + 6 * dim
    small = (64 + 1) * 4 * 64 + (2 if size.gated else 1) * 65 * 128 + 129 * 64 + 6 * 64
    assert sum(p.numel() for p in block.parameters()) == small  # the formula above is that of the code
    return size.depth * per_block + 3 * 16 * 16 * dim + dim + 5 * dim + 2 * dim


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    total = num_parameters(SIZES[name])
    assert total / 1e6 == pytest.approx(PUBLISHED[name], rel=0.015)


@pytest.mark.parametrize(("height", "width"), [(32, 48), (33, 47), (16, 16), (5, 3)])
def test_any_image_size(height, width):
    model = tiny().eval()
    image = torch.randn(1, 3, height, width)
    (features,) = model(image)
    assert features.patches.shape == (1, -(-height // 16), -(-width // 16), 32)
    padded = torch.zeros(1, 3, -(-height // 16) * 16, -(-width // 16) * 16)
    padded[..., :height, :width] = image
    torch.testing.assert_close(model(padded)[0].patches, features.patches)


def test_features_of_any_blocks_in_their_order():
    model = tiny().eval()
    image = torch.randn(2, 3, 32, 32)
    last, first = model(image, blocks=[2, 0])
    torch.testing.assert_close(last.cls, model(image)[0].cls)
    assert not torch.allclose(first.cls, last.cls)
    for parameter in model.blocks[1].parameters():
        parameter.data.zero_()
    torch.testing.assert_close(model(image, blocks=[0])[0].patches, first.patches)  # later blocks are not run


def test_position_matters_and_turns_with_the_image():
    model = tiny().eval()
    image = torch.zeros(1, 3, 48, 48)
    image[..., :16, :16] = 1.0
    corner = model(image)[0].patches
    image = torch.zeros(1, 3, 48, 48)
    image[..., 16:32, 16:32] = 1.0
    centre = model(image)[0].patches
    assert not torch.allclose(corner[0, 0, 0], centre[0, 1, 1], atol=1e-4)


@pytest.mark.parametrize(("freeze", "trainable"), [("none", 3), ("all", 0), (2, 1), ("1", 2), (0, 3)])
def test_frozen_blocks(freeze, trainable):
    model = tiny(freeze=freeze, drop_path=0.9)
    moving = {name.split(".")[1] for name, p in model.named_parameters() if p.requires_grad and "blocks" in name}
    assert len(moving) == trainable
    embeds = freeze in ("none", 0)
    assert model.patch_embed.proj.weight.requires_grad is model.cls_token.requires_grad is embeds
    assert model.norm.weight.requires_grad is (freeze != "all")
    model.train()
    assert [block.training for block in model.blocks] == [False] * (3 - trainable) + [True] * trainable
    image = torch.randn(1, 3, 32, 32)
    loss = model(image)[0].patches.square().mean()
    assert loss.requires_grad is (freeze != "all")
    if freeze == "all":  # nothing is dropped in what stays as it is
        torch.testing.assert_close(loss, model(image)[0].patches.square().mean())


def test_recomputed_activations_give_the_same_gradients():
    gradients = []
    for recompute in (False, True):
        model = tiny(activation_checkpointing=recompute, drop_path=0.5, freeze=1).train()
        torch.manual_seed(1)
        model(torch.randn(4, 3, 32, 32))[0].patches.square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_drop_path_keeps_the_mean():
    model = tiny(drop_path=0.5).train()
    block = model.blocks[2]  # 0.5 in the last, 0 in the first
    assert [each.drop_path for each in model.blocks] == [0.0, 0.25, 0.5]
    branch = torch.ones(4000, 1, 1)
    dropped = block._dropped(branch)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.1)


def test_rescaled_positions_only_in_training():
    model = tiny(rope_rescale=2.0)
    image = torch.randn(1, 3, 32, 32)
    plain = tiny().eval()(image)[0].patches
    torch.testing.assert_close(model.eval()(image)[0].patches, plain)
    assert not torch.allclose(model.train()(image)[0].patches, plain, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze": "half"}, "model.freeze=half is not one of none, all, or a number of blocks from 0 to 3"),
        ({"freeze": 4}, "from 0 to 3"),
        ({"drop_path": 1.0}, "model.drop_path=1.0 is not a probability below 1"),
        ({"patch_size": 0}, "model.patch_size=0 must be at least 1"),
        ({"rope_rescale": 0.5}, "must be more than 1"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        tiny(**settings)


def test_heads_that_do_not_divide():
    with pytest.raises(ConfigError, match="the nearest is embed_dim=36"):
        VisionTransformer(dataclasses.replace(TINY, num_heads=3))
