"""Classifier and segmenter with every head: losses, inference on whole images, what is trained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from exp.errors import ConfigError
from exp.vision.dinov3.models import Distiller, SceneClassifier, Segmenter

SMALL = {"embed_dim": 32, "depth": 4, "num_heads": 2, "layer_scale_init": 0.5}
VARIANTS = {
    "linear probe": {"freeze": "all", "head": "linear"},
    "everything": {
        "auxiliary_weight": 0.4, "dice_weight": 0.5, "class_weights": [1.0, 2.0, 0.5], "out_indices": [1, -1],
        "drop_path_rate": 0.1, "activation_checkpointing": True, "dropout": 0.1, "head_channels": 16,
    },
    "inner block": {"out_indices": [0], "head": "linear"},
    "upernet": {"head": "upernet", "head_channels": 16, "head_norm": "group", "dropout": 0.1},
    "dpt": {"head": "dpt", "head_channels": 16, "head_norm": "group", "dropout": 0.1},
}  # fmt: skip


def images(*size, count=2):
    return torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_every_trainable_parameter_gets_a_gradient_from_an_image_of_any_size(settings):
    for size in ((16, 16), (33, 80)):
        model, image = Segmenter(3, **SMALL, **settings).train(), images(*size)
        losses = model(image=image, label=image[:, 0] % 3, mode="loss")
        sum(losses.values()).backward()
        assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
        assert model(image=image, mode="tensor").shape == (2, 3, *size)
    assert ("loss_auxiliary" in losses) is ("auxiliary_weight" in settings)


@pytest.mark.parametrize("head", ["upernet", "dpt"])
def test_each_of_the_four_blocks_and_for_dpt_the_cls_token_matters(head):
    torch.manual_seed(0)
    model, image = Segmenter(3, **SMALL, **VARIANTS[head]).eval(), images(48, 64)
    maps = []
    assert Segmenter(3, **{**SMALL, **VARIANTS[head], "depth": 6}).out_indices == [1, 2, 4, 5]
    for features in model.features(image, [0, 1, 2, 3]):
        maps.append(features.patches.permute(0, 3, 1, 2))
        maps += [features.cls[:, :, None, None].expand_as(maps[-1])] * (head == "dpt")
    maps = torch.cat(maps, dim=1).detach().requires_grad_()
    scores = model.head(maps)
    torch.testing.assert_close(model(image=image), F.interpolate(scores, (48, 64), mode="bilinear"))
    (gradient,) = torch.autograd.grad(scores.square().sum(), maps)
    assert gradient.abs().sum(dim=(0, 2, 3)).min() > 0


def test_labels_of_images_do_not_depend_on_what_they_are_batched_with():
    model = Segmenter(3, **SMALL, head="linear", window=32, overlap=0.25).eval()
    sizes = [(40, 56), (64, 33), (20, 20)]
    alone = [images(*size, count=1)[0] for size in sizes]

    def padded(parts, value):
        return torch.stack([F.pad(p, (0, 56 - p.shape[-1], 0, 64 - p.shape[-2]), value=value) for p in parts])

    together = model(image=padded(alone, 0), sizes=sizes, mode="predict")
    assert torch.equal(together, padded([model(image=image[None], mode="predict")[0] for image in alone], 255))


@pytest.mark.skipif(not hasattr(getattr(torch, "compiler", None), "set_stance"), reason="needs torch 2.6")
def test_windows_are_compiled_once_for_images_of_all_sizes():
    model = Segmenter(3, **SMALL, **VARIANTS["dpt"], window=32, overlap=0.25).eval()
    sizes = [(64, 80), (100, 300), (56, 130), (200, 60)]  # the second makes the number of windows a variable
    plain = [model(image=images(*size), mode="predict") for size in sizes]
    model.compile(backend="eager")
    for size, expected in zip(sizes, plain):
        with torch.compiler.set_stance("default" if size in sizes[:2] else "fail_on_recompile"):
            assert torch.equal(model(image=images(*size), mode="predict"), expected)


@pytest.mark.parametrize("kind", ["scenes", "tiles"])
def test_heads_and_losses_are_in_float32_under_autocast(kind):
    """With the same backbone output, beyond what float16 carries, they equal those without autocast."""
    torch.manual_seed(0)
    image = images(32, 32)
    if kind == "scenes":
        model, label = SceneClassifier(4, **SMALL), torch.tensor([1, 3])
    else:
        model = Segmenter(4, auxiliary_weight=0.4, dice_weight=0.5, dropout=0.0, **SMALL)
        label = image[:, 0] % 4
    model.backbone.norm.weight.data.fill_(1e6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = model.features(image, [0, 1, 2, 3])
        results = [model(image=image, label=label, mode="loss"), model(image=image)]
    assert features[-1].patches.abs().max() > 1e6
    assert torch.isfinite(results[1]).all()
    model.features = lambda image, indices: [features[index] for index in indices]  # from here on they are the same
    exact = [model(image=image, label=label, mode="loss"), model(image=image)]
    torch.testing.assert_close(results, exact, rtol=1e-6, atol=0)  # dtypes, too


REFUSED = [
    (SceneClassifier, {"size": "vits61"}, "vits16"),  # the nearest
    (SceneClassifier, {"embed_dim": 32, "num_heads": 3}, "embed_dim=36"),
    (SceneClassifier, {"freeze": "half"}, "freeze"),
    (SceneClassifier, {"normalization": "web", "pixel_mean": [1.0] * 3, "pixel_std": [1.0] * 3}, "normalization"),
    (SceneClassifier, {"out_indices": [5]}, "out_indices"),
    (SceneClassifier, {"lora": {"rank": 4, "targets": ["w1"]}}, "targets"),
    (SceneClassifier, {"lora": {"rank": 4}, "freeze": "all"}, "freeze"),
    (SceneClassifier, {"cross_entropy_weight": 0.0}, "cross_entropy_weight"),
    (Segmenter, {"head": "uper"}, "upernet"),
    (Segmenter, {"head_norm": "layer"}, "head_norm"),
    (Segmenter, {"auxiliary_weight": 0.4, "auxiliary_out_index": 7}, "auxiliary_out_index"),
    (Segmenter, {"inference": "crop"}, "inference"),
    (Segmenter, {"head": "upernet", "out_indices": [1, 2]}, "out_indices"),
    (Distiller, {"teacher": {"size": "vits61"}}, "teacher"),
    (Distiller, {"cls_token_weight": 0.0, "patch_weight": 0.0}, "patch_weight"),
    (Distiller, {"out_indices": [0]}, "out_indices"),
]


def test_settings_that_cannot_be_are_refused_by_their_key():
    for kind, settings, key in REFUSED:
        with pytest.raises(ConfigError, match=key):
            kind(*([3] if kind is not Distiller else []), **{**SMALL, **settings})
