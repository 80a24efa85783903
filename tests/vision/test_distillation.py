"""Distillation: the terms by their formulas, and a teacher that is nowhere else."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from exp.errors import ConfigError
from exp.vision.models import Encoder, SceneClassifier, Segmenter
from tests.vision.parts import head, term, vit

STUDENT = {"embed_dim": 16, "depth": 1, "num_heads": 1, "layer_scale_init": 0.5}
TEACHER = {"size": "tiny", "embed_dim": 32, "depth": 2, "num_heads": 2, "layer_scale_init": 0.5}
MIT = {"_target_": "exp.vision.backbones.segformer.MixTransformer", "size": "b0"}
IMAGES = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
CLASSES = ["a", "b", "c"]


@pytest.fixture
def weights(tmp_path):
    """A teacher's weights: of a run, with another head and normalization."""
    torch.manual_seed(3)
    model = SceneClassifier(4, backbone=vit(**TEACHER), normalization="satellite")
    torch.save(model.state_dict(), tmp_path / "teacher.pth")
    return model.eval(), str(tmp_path / "teacher.pth")


@pytest.fixture
def segmenter(tmp_path):
    """A segmenter, and the folder of its run."""
    keys = {"backbone": vit(**TEACHER), "head": head("Linear"), "normalization": "satellite"}
    torch.manual_seed(3)
    model = Segmenter(3, **keys)
    torch.nn.init.normal_(model.head.classify.weight)  # as it begins, all scores are alike
    config = {"launcher": {"_target_": "auto"}, "model": {"_target_": "exp.vision.models.Segmenter", **keys}}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    content = {"state_dict": model.state_dict(), "data": {"classes": CLASSES}}
    torch.save(content, tmp_path / "checkpoints" / "best.pth")
    return model.eval(), str(tmp_path)


def student(file, **settings):
    torch.manual_seed(0)
    return Encoder(teacher={"backbone": vit(**TEACHER), "init_from": file}, backbone=vit(**STUDENT), **settings)


def pupil(run, *terms, **keys):
    """A small SegFormer that learns from a run."""
    torch.manual_seed(0)
    model = Segmenter(3, **{"backbone": MIT, "head": head("Segformer", channels=16, norm="group"), **keys},
                      teacher={"init_from": run}, distillation=list(terms))  # fmt: skip
    model.prepare_training()
    return model


def standardized(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()


def test_features_of_an_encoder_by_their_formulas(weights):
    teacher, file = weights
    features = {"weight": 2.0, "cosine": 0.75, "smooth_l1": 0.25, "mse": 0.5}
    model = student(file, distillation=[term("FeatureMaps", part="cls", weight=0.5), term("FeatureMaps", **features)])
    theirs, ours = teacher.features(IMAGES), model.features(IMAGES)
    their_patches, our_patches = (features.maps[0].permute(0, 2, 3, 1) for features in (theirs, ours))
    project_cls, project_patches = (term.project[0] for term in model.distillation.terms)
    cosine_cls = F.cosine_similarity(project_cls(ours.cls[0]), standardized(theirs.cls[0]), dim=-1)
    projected, wanted = project_patches(our_patches), standardized(their_patches)
    cosine = F.cosine_similarity(projected, wanted, dim=-1)
    distance = (projected - wanted).abs()
    smooth = torch.where(distance < 1, distance.square() / 2, distance - 0.5).mean()
    expected = {
        "loss_cls": 0.5 * (1 - cosine_cls.mean()),
        "loss_patches": 2.0 * (0.75 * (1 - cosine.mean()) + 0.5 * distance.square().mean() + 0.25 * smooth),
    }
    torch.testing.assert_close(model(image=IMAGES, mode="loss"), expected, rtol=1e-4, atol=1e-5)
    alike = model(image=IMAGES, mode="predict")
    torch.testing.assert_close(list(alike), [cosine_cls, cosine.mean(dim=(1, 2))], rtol=1e-4, atol=1e-5)


def test_labels_logits_several_levels_and_attention_of_a_segmenter_by_their_formulas(segmenter):
    teacher, run = segmenter
    levels = [[0, 0], [3, -1]]
    terms = [term("Labels", weight=0.5), term("Logits", weight=3.0, temperature=2.0)]
    terms += [term("FeatureMaps", levels=levels, cosine=0.0, mse=1.0), term("Attention", weight=2.0)]
    model = pupil(run, *terms).eval()
    label = (IMAGES[:, 0] % 4).clone()
    label[label == 3] = 255
    with torch.no_grad():
        losses = model(image=IMAGES, label=label, mode="loss")
        plain = F.cross_entropy(model(image=IMAGES), label.long(), ignore_index=255, reduction="sum") / label.numel()
        ours, theirs = (torch.softmax(each(image=IMAGES) / 2.0, dim=1) for each in (model, teacher))
        divergence = (theirs * (theirs.log() - ours.log())).sum(1).mean() * 4.0
        distances = []
        own, other = model.features(IMAGES, [0, 3]), teacher.features(IMAGES, [0, 1])
        for project, small, large in zip(model.distillation.terms[2].project, own.maps, other.maps):
            large = F.interpolate(large, size=small.shape[2:], mode="bilinear", align_corners=False)
            target = standardized(large.permute(0, 2, 3, 1))
            distances.append((project(small.permute(0, 2, 3, 1)) - target).square().mean())
        # 64 pixels: 2 x 2 cells of the student's last level, 4 x 4 and a CLS and four other tokens of the teacher.
        small = model.backbone.attention(model.normalize(IMAGES), [3])[0].mean(1)
        large = teacher.backbone.attention(teacher.normalize(IMAGES), [1])[0].mean(1)[:, 5:, 5:]
        large = (large / large.sum(-1, keepdim=True)).view(-1, 4, 4, 4, 4)
        pooled = large.view(-1, 2, 2, 2, 2, 2, 2, 2, 2).mean(dim=(2, 4, 6, 8)).reshape(-1, 4, 4)
        pooled = pooled / pooled.sum(-1, keepdim=True)
        attention = (pooled * (pooled.log() - small.log())).sum(-1).mean()
    expected = {
        "loss_crossentropy": 0.5 * plain,
        "loss_logits": 3.0 * divergence,
        "loss_patches": sum(distances) / 2,
        "loss_attention": 2.0 * attention,
    }
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-5)
    assert all(float(loss) > 1e-4 for loss in losses.values())


def test_a_student_of_classes_has_its_teacher_in_training_alone(segmenter):
    _, run = segmenter
    random = torch.random.get_rng_state()
    model = pupil(run, term("Logits"), term("FeatureMaps", levels=[[1, 0]]))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sum(model(image=IMAGES, mode="loss").values()).backward()  # no labels, and no term that needs them
    assert [name for name, p in trained.items() if p.grad is None] == []
    assert {name for name in trained if "distillation" in name} == {
        f"distillation.terms.1.project.0.{kind}" for kind in ("weight", "bias")
    }
    deployed = Segmenter(3, backbone=MIT, head=head("Segformer", channels=16, norm="group"))
    state = deployed.adapt_state_dict(model.state_dict(), None)
    assert state.keys() == deployed.state_dict().keys()
    torch.random.set_rng_state(random)
    for terms, keys, reason in (
        ([term("FeatureMaps", levels=[[3, 0]])], {"backbone": {**MIT, "out_indices": [0, 1]}, "head": head("Linear")},
         "level 3 comes after"),
        ([term("Attention")], {"backbone": {"_target_": "exp.vision.backbones.convnext.ConvNext", "size": "tiny"}},
         "Attention needs both networks, and model has no method attention"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=reason):
            pupil(run, *terms, **keys)


@pytest.mark.parametrize("weights_of_parts", [(0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
def test_the_student_is_trained_with_all_of_its_parameters_and_the_teacher_is_none_of_them(weights, weights_of_parts):
    parts = zip(("cls", "patches"), weights_of_parts)
    terms = [term("FeatureMaps", part=part, weight=weight) for part, weight in parts]
    model = student(weights[1], distillation=terms).train()
    before, random = dict(model.named_parameters()), torch.random.get_rng_state()
    sum(model(image=IMAGES, mode="loss").values()).backward()
    assert torch.equal(torch.random.get_rng_state(), random)
    assert dict(model.named_parameters()).keys() == before.keys()
    assert [name for name, p in before.items() if p.requires_grad != (p.grad is not None)] == []
