"""The backbone beside its formulas, number by number in float64, and constants as literals; nothing here is skipped."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from exp.vision.backbones.vit import VisionTransformer
from exp.vision.backbones.vit_weights import rope_periods
from exp.vision.models import SceneClassifier, Segmenter
from tests.vision.parts import head, loss, vit

HEADS, PATCH, STORAGE = 2, 4, 4
SMALL = vit(embed_dim=16, depth=1, num_heads=1)


def backbone(gated):
    """Two blocks of 16 elements, whose weights and biases are all different, those of the keys included."""
    torch.manual_seed(0)
    size = "vits16plus" if gated else "vits16"
    model = VisionTransformer(size=size, embed_dim=16, depth=2, num_heads=HEADS, patch_size=PATCH).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.4)
    return model


def normalized(x, weight, bias):
    mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * weight + bias


def rotated(x, row, column):
    """A head's 8 elements at a place in [-1, 1] x [-1, 1]: pairs (i, i + 4), two turned by the row, two by the column.

    The periods are 1 and 100 ** (1 / 2).
    """
    made = x.copy()
    for pair, (place, period) in enumerate([(row, 1.0), (row, 10.0), (column, 1.0), (column, 10.0)]):
        angle = 2 * math.pi * place / period
        first, second = x[pair], x[pair + 4]
        made[pair] = first * math.cos(angle) - second * math.sin(angle)
        made[pair + 4] = first * math.sin(angle) + second * math.cos(angle)
    return made


def by_formulas(state, image, gated):
    """Tokens after the final norm, (N, D), and after the first block."""
    rows, columns = image.shape[1] // PATCH, image.shape[2] // PATCH
    places, tokens = [], [state["cls_token"][0, 0], *state["storage_tokens"][0]]
    for row in range(rows):
        for column in range(columns):
            part = image[:, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
            tokens.append(
                (state["patch_embed.proj.weight"] * part).sum(axis=(1, 2, 3)) + state["patch_embed.proj.bias"]
            )
            places.append(((2 * row + 1) / rows - 1, (2 * column + 1) / columns - 1))
    x, after = np.stack(tokens), []
    for number in range(2):
        own = {key.split(".", 2)[2]: value for key, value in state.items() if key.startswith(f"blocks.{number}.")}
        normed = normalized(x, own["norm1.weight"], own["norm1.bias"])
        bias = own["attn.qkv.bias"].copy()
        bias[16:32] = 0.0  # keys have none
        query, key, value = np.split(normed @ own["attn.qkv.weight"].T + bias, 3, axis=-1)
        mixed = np.zeros_like(x)
        for first in range(0, 8 * HEADS, 8):
            part = slice(first, first + 8)
            turned = [each[:, part].copy() for each in (query, key)]
            for each in turned:
                for token, place in enumerate(places, 1 + STORAGE):
                    each[token] = rotated(each[token], *place)
            scores = np.exp(turned[0] @ turned[1].T / math.sqrt(8))
            mixed[:, part] = scores / scores.sum(axis=-1, keepdims=True) @ value[:, part]
        x = x + own["ls1.gamma"] * (mixed @ own["attn.proj.weight"].T + own["attn.proj.bias"])
        normed = normalized(x, own["norm2.weight"], own["norm2.bias"])
        if gated:
            gate, value = (normed @ own[f"mlp.{name}.weight"].T + own[f"mlp.{name}.bias"] for name in ("w1", "w2"))
            hidden, last = gate / (1 + np.exp(-gate)) * value, "w3"
        else:
            wide, last = normed @ own["mlp.fc1.weight"].T + own["mlp.fc1.bias"], "fc2"
            hidden = wide * np.vectorize(lambda number: 0.5 * (1 + math.erf(number / math.sqrt(2))))(wide)
        x = x + own["ls2.gamma"] * (hidden @ own[f"mlp.{last}.weight"].T + own[f"mlp.{last}.bias"])
        after.append(normalized(x, state["norm.weight"], state["norm.bias"]))
    return after


@pytest.mark.parametrize("gated", [False, True])
def test_features_are_those_of_the_formulas(gated):
    """On an image of two by three patches."""
    model, image = backbone(gated), torch.randn(3, 2 * PATCH, 3 * PATCH)
    norms = [module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert norms == [1e-5] * 5, "too small to be seen in features of this size"
    state = {key: value.double().numpy() for key, value in model.state_dict().items()}
    with torch.no_grad():
        found = model(image[None], out_indices=[0, 1])
    for cls, patches, expected in zip(found.cls, found.maps, by_formulas(state, image.double().numpy(), gated)):
        np.testing.assert_allclose(cls[0], expected[0], atol=2e-4)
        np.testing.assert_allclose(patches[0].permute(1, 2, 0), expected[1 + STORAGE :].reshape(2, 3, 16), atol=2e-4)


def test_constants_are_the_papers():
    """Of ImageNet and of the satellite images of pretraining, red, green, blue; periods of heads of 64 elements."""
    for name, mean, std in (
        ("web", [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]),
        ("satellite", [109.65, 104.805, 75.48], [54.315, 39.78, 36.465]),
    ):
        model = SceneClassifier(3, backbone=SMALL, normalization=name)
        assert model.pixel_mean.flatten().tolist() == pytest.approx(mean)
        assert model.pixel_std.flatten().tolist() == pytest.approx(std)
        assert model.normalization == name
        seen = []
        model.backbone.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        model.features(torch.full((1, 3, 16, 16), 200, dtype=torch.uint8))
        assert seen[0][0, :, 0, 0].tolist() == pytest.approx([(200 - a) / b for a, b in zip(mean, std)], rel=1e-5)
    periods = rope_periods(64).tolist()
    assert (len(periods), periods[0], periods[8]) == (16, 1.0, pytest.approx(10.0))
    assert periods[15] == pytest.approx(74.98942)


def test_a_scene_is_classified_by_the_cls_token_and_the_mean_of_its_patches():
    model = SceneClassifier(3, backbone={**SMALL, "layer_scale_init": 1.0}).eval()
    image = torch.randint(0, 256, (1, 3, 32, 48))
    features = model.features(image)
    halves = model.head.weight.chunk(2, dim=1)
    expected = features.cls[0][0] @ halves[0].T + features.maps[0][0].flatten(1).mean(dim=1) @ halves[1].T
    torch.testing.assert_close(model(image=image)[0], expected + model.head.bias)


def test_scores_of_patches_are_at_their_centers():
    """Worked out by hand: two patches of 4 pixels with scores 0 and 8: a ramp from one center to the other."""
    model = Segmenter(1, backbone={**SMALL, "patch_size": 4}, head=head("Linear")).eval()
    model.head.register_forward_hook(lambda *_: torch.tensor([[[[0.0, 8.0]]]]))
    with torch.no_grad():
        assert model(image=torch.zeros(1, 3, 4, 8))[0, 0, 0].tolist() == [0, 0, 1, 3, 5, 7, 8, 8]


def test_weights_of_losses_count():
    """A pixel of two classes with equal scores: -log(1 / 2) times weights; smoothing spreads the target."""
    label, image = torch.zeros(1, 16, 16, dtype=torch.uint8), torch.zeros(1, 3, 16, 16)
    losses = [loss("CrossEntropy"), loss("Focal", weight=0.5, gamma=1.0)]
    model = Segmenter(
        2, backbone=SMALL, head=head("Linear"), losses=losses, class_weights=[3.0, 1.0], auxiliary_weight=0.25
    ).eval()
    for part in (model.head, model.auxiliary_head):
        torch.nn.init.zeros_(part.classify.weight)
        torch.nn.init.zeros_(part.classify.bias)
    found = {name: value.item() for name, value in model(image=image, label=label, mode="loss").items()}
    log2 = math.log(2.0)
    assert found == pytest.approx(
        {"loss_crossentropy": 3 * log2, "loss_focal": 0.75 * log2, "loss_auxiliary": 0.75 * log2}
    )
    scenes = SceneClassifier(2, backbone=SMALL, losses=[loss("CrossEntropy", label_smoothing=0.2)])
    torch.nn.init.zeros_(scenes.head.weight)
    scenes.head.bias.data = torch.tensor([0.0, math.log(3.0)])  # probabilities 1/4 and 3/4
    value = scenes(image=image, label=torch.tensor([1]), mode="loss")["loss"].item()
    assert value == pytest.approx(-0.9 * math.log(0.75) - 0.1 * math.log(0.25))
