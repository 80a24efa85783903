"""Classifier and segmenter with every head: losses, inference on whole images, what is trained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from exp.config.resolve import trust_packages
from exp.errors import ConfigError
from exp.vision.backbones.base import Backbone, Features
from exp.vision.models import Encoder, SceneClassifier, Segmenter
from exp.vision.tiling import Tiling
from tests.vision.parts import head, loss, term, vit

SMALL = {"embed_dim": 32, "depth": 4, "num_heads": 2, "layer_scale_init": 0.5}
LIGHT = {"channels": 16, "norm": "group", "dropout": 0.1}
VARIANTS = {
    "linear probe": {"freeze": "all", "head": head("Linear")},
    "everything": {
        "auxiliary_weight": 0.4, "losses": [loss("CrossEntropy"), loss("Dice", weight=0.5)],
        "class_weights": [1.0, 2.0, 0.5], "head": head("Upsample", channels=16, dropout=0.1),
        "backbone": vit(**SMALL, out_indices=[1, -1], drop_path_rate=0.1, activation_checkpointing=True),
    },
    "inner block": {"backbone": vit(**SMALL, out_indices=[0]), "head": head("Linear")},
    "upernet": {"head": head("UperNet", **LIGHT)},
    "dpt": {"head": head("Dpt", **LIGHT)},
    "segformer": {"head": head("Segformer", **LIGHT)},
    "mask transformer": {"freeze": "all", "head": head("MaskTransformer", channels=16)},
}  # fmt: skip


def segmenter(classes=3, backbone=None, **settings):
    return Segmenter(classes, **{"backbone": backbone or vit(**SMALL), "head": head("Upsample"), **settings})


def images(*size, count=2):
    return torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_every_trainable_parameter_gets_a_gradient_from_an_image_of_any_size(settings):
    for size in ((16, 16), (33, 80)):
        model, image = segmenter(**settings).train(), images(*size)
        losses = model(image=image, label=image[:, 0] % 3, mode="loss")
        sum(losses.values()).backward()
        assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
        assert model(image=image, mode="tensor").shape == (2, 3, *size)
    assert ("loss_auxiliary" in losses) is ("auxiliary_weight" in settings)


@pytest.mark.parametrize("kind", ["upernet", "dpt", "segformer"])
def test_each_of_the_four_blocks_and_for_dpt_the_cls_token_matters(kind):
    torch.manual_seed(0)
    model, image = segmenter(**VARIANTS[kind]).eval(), images(48, 64)
    assert segmenter(backbone=vit(**{**SMALL, "depth": 6}), **VARIANTS[kind]).out_indices == [1, 2, 4, 5]
    features = model.features(image, [0, 1, 2, 3])
    maps, cls = ([value.detach().requires_grad_() for value in values] for values in (features.maps, features.cls))
    scores = model.head(maps, cls)
    torch.testing.assert_close(model(image=image), F.interpolate(scores, (48, 64), mode="bilinear"))
    used = [*maps, *(cls if kind == "dpt" else [])]
    gradients = torch.autograd.grad(scores.square().sum(), used)
    assert min(gradient.flatten(2).abs().sum(dim=(0, 2)).min() for gradient in gradients[:4]) > 0
    assert min(gradient.abs().sum(dim=0).min() for gradient in gradients) > 0 or kind != "dpt"


def test_labels_of_images_do_not_depend_on_what_they_are_batched_with():
    model = segmenter(head=head("Linear"), window=32, overlap=0.25).eval()
    sizes = [(40, 56), (64, 33), (20, 20)]
    alone = [images(*size, count=1)[0] for size in sizes]

    def padded(parts, value):
        return torch.stack([F.pad(p, (0, 56 - p.shape[-1], 0, 64 - p.shape[-2]), value=value) for p in parts])

    together = model(image=padded(alone, 0), sizes=sizes, mode="predict")
    assert torch.equal(together, padded([model(image=image[None], mode="predict")[0] for image in alone], 255))


@pytest.mark.skipif(not hasattr(getattr(torch, "compiler", None), "set_stance"), reason="needs torch 2.6")
def test_windows_are_compiled_once_for_images_of_all_sizes():
    model = segmenter(**VARIANTS["dpt"], window=32, overlap=0.25).eval()
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
        model, label = SceneClassifier(4, backbone=vit(**SMALL)), torch.tensor([1, 3])
    else:
        model = segmenter(4, auxiliary_weight=0.4, losses=[loss("CrossEntropy"), loss("Dice", weight=0.5)])
        label = image[:, 0] % 4
    model.backbone.norm.weight.data.fill_(1e6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = model.features(image, [0, 1, 2, 3])
        results = [model(image=image, label=label, mode="loss"), model(image=image)]
    assert features.maps[-1].abs().max() > 1e6
    assert torch.isfinite(results[1]).all()
    model.features = lambda image, indices: Features(  # from here on they are the same
        [features.maps[index] for index in indices], [features.cls[index] for index in indices]
    )
    exact = [model(image=image, label=label, mode="loss"), model(image=image)]
    torch.testing.assert_close(results, exact, rtol=1e-6, atol=0)  # dtypes, too


SCENES, TILES, STUDENT = {"backbone": vit(**SMALL)}, {"backbone": vit(**SMALL), "head": head("UperNet")}, {
    "backbone": vit(**SMALL), "teacher": {"backbone": vit(**SMALL)}
}  # fmt: skip
REFUSED = [
    (SceneClassifier, {"backbone": vit(size="vits61")}, "vits16"),  # the nearest
    (SceneClassifier, {"backbone": vit(embed_dim=32, num_heads=3)}, "embed_dim=36"),
    (SceneClassifier, {"backbone": {"size": "tiny"}}, "model.backbone"),
    (SceneClassifier, {"backbone": head("Linear")}, "model.backbone._target_"),
    (SceneClassifier, {**SCENES, "freeze": "half"}, "freeze"),
    (SceneClassifier, {**SCENES, "normalization": "web", "pixel_mean": [1.0] * 3, "pixel_std": [1.0] * 3},
     "normalization"),
    (SceneClassifier, {"backbone": vit(**SMALL, out_indices=[5])}, "out_indices"),
    (SceneClassifier, {**SCENES, "lora": {"rank": 4, "targets": ["w1"]}}, "targets"),
    (SceneClassifier, {**SCENES, "lora": {"rank": 4}, "freeze": "all"}, "freeze"),
    (SceneClassifier, {**SCENES, "losses": []}, "model.losses"),
    (SceneClassifier, {**SCENES, "losses": [loss("Focal", gama=1)]}, "gama"),
    (Segmenter, {**TILES, "head": {"_target_": "exp.vision.heads.UperNett"}}, "UperNet"),
    (Segmenter, {**TILES, "head": head("UperNet", norm="layer")}, "norm"),
    (Segmenter, {**TILES, "auxiliary_weight": 0.4, "auxiliary_out_index": 7}, "auxiliary_out_index"),
    (Segmenter, {**TILES, "inference": "crop"}, "inference"),
    (Segmenter, {**TILES, "backbone": vit(**SMALL, out_indices=[1, 2])}, "out_indices"),
    (Encoder, {**STUDENT, "teacher": {"backbone": vit(size="vits61")}}, "model.teacher: model.backbone.size"),
    (Encoder, {**STUDENT, "distillation": [term("FeatureMaps", weight=0.0)]}, "weight above 0"),
    (Encoder, {**STUDENT, "backbone": vit(**SMALL, out_indices=[0])}, "out_indices"),
    (Encoder, {**STUDENT, "distillation": [term("FeatureMaps", levels=[[0, 9]])]}, "model.teacher has levels 0 to 3"),
    (Encoder, {**STUDENT, "distillation": [term("FeatureMaps", part="map")]}, "part=map"),
    (Encoder, {**STUDENT, "distillation": [term("FeatureMaps", cosine=0.0)]}, "cosine"),
    (Encoder, {**STUDENT, "distillation": [term("Logits")]}, "Logits needs both"),
    (Encoder, {**STUDENT, "distillation": [loss("Dice")]}, "Term"),
    (SceneClassifier, {**SCENES, "teacher": {"init_from": "run"}}, "model.distillation"),
]  # fmt: skip


def test_settings_that_cannot_be_are_refused_by_their_key():
    for kind, settings, key in REFUSED:
        with pytest.raises(ConfigError, match=key):
            kind(*([3] if kind is not Encoder else []), **settings)


class Cnn(Backbone):
    """Stages of convolutions, without CLS token: what a stranger would bring."""

    input_weights = ("stem.weight",)

    def __init__(self, in_channels=3, out_indices=None, width=8):
        super().__init__(in_channels, out_indices)
        self.level_channels, self.level_strides = [width, 2 * width, 4 * width, 8 * width], [4, 8, 16, 32]
        self.select_levels(None)
        self.stem = nn.Conv2d(in_channels, width, 2, stride=2)
        widths = [width, *self.level_channels]
        self.levels = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 2, stride=2), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in zip(widths, widths[1:])
        )
        self.mix = nn.ModuleList(nn.Linear(b, b) for b in self.level_channels)

    def stages(self):
        return [[level, mix] for level, mix in zip(self.levels, self.mix)]

    def forward(self, image, out_indices=None):
        indices = self.out_indices if out_indices is None else out_indices
        x, maps = self.stem(self.pad(image)), []
        for level, mix in list(zip(self.levels, self.mix))[: max(indices) + 1]:
            x = level(x)
            x = mix(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            maps.append(x.float())
        return Features([maps[index] for index in indices])


CNN = {"_target_": f"{__name__}.Cnn"}


@pytest.mark.parametrize("kind", ["Linear", "Upsample", "UperNet", "Dpt", "Segformer", "MaskTransformer"])
def test_every_head_trains_on_any_backbone(kind):
    trust_packages(["tests"])
    torch.manual_seed(0)
    keys = {} if kind == "Linear" else {"channels": 16}
    model, image = (
        segmenter(backbone=CNN, head=head(kind, **keys), auxiliary_weight=0.4, freeze=1).train(),
        images(70, 90),
    )
    assert model.out_indices == ([0, 1, 2, 3] if kind in ("UperNet", "Dpt", "Segformer") else [3])
    sum(model(image=image, label=image[:, 0] % 3, mode="loss").values()).backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    frozen = {name for name, p in model.backbone.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in model.backbone.named_parameters() if n.startswith(("stem", "levels.0", "mix.0"))}
    assert [stage[0].training for stage in model.backbone.stages()] == [False, True, True, True]
    model.tiling = Tiling("slide", 32, 0.5, [1.0, 0.5], flip=True)
    assert model.eval()(image=image, mode="predict").shape == (2, 70, 90)


def test_scenes_updates_and_layers_work_with_any_backbone():
    trust_packages(["tests"])
    model, image = SceneClassifier(4, backbone=CNN, lora={"rank": 2}).train(), images(40, 40)
    assert (model.head.in_features, model.num_layers, model.layer_of("backbone.mix.2.weight")) == (64, 6, 3)
    assert model.layer_of("backbone.stem.weight") == 0
    model(image=image, label=torch.tensor([1, 3]), mode="loss")["loss"].backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    updates = {f"backbone.mix.{level}.lora.{level}.{part}" for level in range(4) for part in ("down", "up")}
    assert trained == updates | {"head.weight", "head.bias"}
    with pytest.raises(ConfigError, match="Cnn has no method attention"):
        model.backbone.attention(image)
