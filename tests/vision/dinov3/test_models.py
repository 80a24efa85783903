"""Classifier and segmenter: losses, inference on whole images, what is trained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from exp.compat import TORCH_VERSION
from exp.vision.dinov3 import SceneClassifier, Segmenter

SMALL = {"embed_dim": 32, "depth": 3, "num_heads": 2, "layer_scale": 0.5}
VARIANTS = {
    "linear probe": {"freeze": "all", "head": "linear"},
    "up-sampling": {"head": "upsample", "head_norm": "group", "head_channels": 32},
    "everything": {
        "head_channels": 32, "auxiliary_weight": 0.4, "dice_weight": 0.5, "class_weights": [1.0, 2.0, 0.5],
        "blocks": [1, -1], "drop_path": 0.1, "activation_checkpointing": True, "dropout": 0.1,
    },
    "inner block": {"blocks": [0], "head": "linear"},
}  # fmt: skip


def batch(count=2, size=(40, 56), classes=3):
    torch.manual_seed(2)
    image = torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8)
    label = torch.randint(0, classes + 1, (count, *size)).to(torch.uint8)
    label[label == classes] = 255
    return {"image": image, "label": label}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_every_trainable_parameter_gets_a_gradient(settings):
    model = Segmenter(3, **SMALL, **settings).train()
    total, logged = model.parse_losses(model(**batch(), mode="loss"))
    total.backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    if settings.get("auxiliary_weight"):
        parts = [logged[f"loss_{part}"].item() for part in ("ce", "dice", "auxiliary")]
        assert total.item() == pytest.approx(sum(parts), rel=1e-5)


def test_labels_of_images_do_not_depend_on_what_they_are_batched_with():
    model = Segmenter(3, **SMALL, head="linear", window=32, overlap=0.25).eval()
    images = [torch.randint(0, 256, (1, 3, *size), dtype=torch.uint8) for size in ((40, 56), (64, 33), (20, 20))]
    padded = torch.zeros(3, 3, 64, 56, dtype=torch.uint8)
    for row, image in enumerate(images):
        padded[row, :, : image.shape[2], : image.shape[3]] = image[0]
    with torch.no_grad():
        together = model(image=padded, sizes=[tuple(image.shape[2:]) for image in images], mode="predict")
        for row, image in enumerate(images):
            height, width = image.shape[2:]
            alone = model(image=image, mode="predict")[0]
            assert torch.equal(together[row], F.pad(alone, (0, 56 - width, 0, 64 - height), value=255))


def test_scene_loss_and_features():
    model = SceneClassifier(4, **SMALL).eval()
    image = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    label = torch.tensor([1, -1, 3])
    logits = model(image=image, mode="predict")
    loss = model(image=image, label=label, mode="loss")["loss"]
    expected = F.cross_entropy(logits[[0, 2]], label[[0, 2]], reduction="sum") / 3
    torch.testing.assert_close(loss, expected)
    (features,) = model.features(image)
    joined = torch.cat([features.cls, features.patches.mean(dim=(1, 2))], dim=-1)
    torch.testing.assert_close(model.head(joined), logits)


@pytest.mark.parametrize(("kind", "dtype"), [("scenes", torch.float16), ("upsample", torch.bfloat16)])
def test_heads_and_losses_are_in_float32_under_autocast(kind, dtype):
    """With features beyond what float16 carries, and the same backbone output they equal those without autocast."""
    if dtype == torch.float16 and TORCH_VERSION < (2, 3):
        pytest.skip("this torch has no float16 autocast on the CPU")
    torch.manual_seed(0)
    if kind == "scenes":
        model, label = SceneClassifier(4, **SMALL), torch.tensor([1, 3])
    else:
        model = Segmenter(4, head=kind, auxiliary_weight=0.4, dice_weight=0.5, dropout=0.0, **SMALL)
        label = torch.randint(0, 4, (2, 32, 32)).to(torch.uint8)
    model.backbone.norm.weight.data.fill_(1e6)
    image = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.autocast("cpu", dtype=dtype):
        features = model.features(image, [0, 1, 2])
        losses = model(image=image, label=label, mode="loss")
        logits = model(image=image)
    assert logits.dtype == features[-1].patches.dtype == torch.float32
    assert features[-1].patches.abs().max() > 1e6
    assert torch.isfinite(logits).all()
    exact = model(image=image, label=label, mode="loss")
    torch.testing.assert_close(losses, exact, rtol=0.1, atol=1e-3)  # dtypes, too
    model.features = lambda image, blocks: [features[block] for block in blocks]  # from here on they are the same
    exact = [model(image=image, label=label, mode="loss"), model(image=image)]
    torch.testing.assert_close([losses, logits], exact, rtol=1e-6, atol=0)
