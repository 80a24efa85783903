"""Distillation: the loss, and a teacher that is nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from exp.vision.distillation import Distiller
from exp.vision.models import SceneClassifier
from tests.vision.parts import vit

STUDENT = {"embed_dim": 16, "depth": 1, "num_heads": 1, "layer_scale_init": 0.5}
TEACHER = {"size": "tiny", "embed_dim": 32, "depth": 2, "num_heads": 2}
IMAGES = torch.randint(0, 256, (3, 3, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def weights(tmp_path):
    """A teacher's weights: of a run, with another head and normalisation."""
    torch.manual_seed(3)
    model = SceneClassifier(4, backbone=vit(**TEACHER, layer_scale_init=0.5), normalization="satellite")
    torch.save(model.state_dict(), tmp_path / "teacher.pth")
    return model.eval(), str(tmp_path / "teacher.pth")


def student(file, **settings):
    torch.manual_seed(0)
    return Distiller(teacher={"backbone": vit(**TEACHER), "init_from": file}, backbone=vit(**STUDENT), **settings)


def test_losses_and_agreement_by_their_formulas(weights):
    teacher, file = weights
    model = student(file, cls_token_weight=0.5, patch_weight=2.0, smooth_l1_ratio=0.25)
    theirs, ours = teacher.features(IMAGES), model.features(IMAGES)
    their_patches, our_patches = (features.maps[0].permute(0, 2, 3, 1) for features in (theirs, ours))

    def standardized(x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()

    cosine_cls = F.cosine_similarity(model.project_cls(ours.cls[0]), standardized(theirs.cls[0]), dim=-1)
    projected, wanted = model.project_patches(our_patches), standardized(their_patches)
    cosine = F.cosine_similarity(projected, wanted, dim=-1)
    distance = (projected - wanted).abs()
    smooth = torch.where(distance < 1, distance.square() / 2, distance - 0.5).mean()
    expected = {
        "loss_cls": 0.5 * (1 - cosine_cls.mean()),
        "loss_patches": 2.0 * (0.75 * (1 - cosine.mean()) + 0.25 * smooth),
    }
    torch.testing.assert_close(model(image=IMAGES, mode="loss"), expected, rtol=1e-4, atol=1e-5)
    alike = model(image=IMAGES, mode="predict")
    torch.testing.assert_close(list(alike), [cosine_cls, cosine.mean(dim=(1, 2))], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"cls_token_weight": 0.0}, {"patch_weight": 0.0}, {}])
def test_the_student_is_trained_with_all_of_its_parameters_and_the_teacher_is_none_of_them(weights, settings):
    model = student(weights[1], **settings).train()
    before, random = dict(model.named_parameters()), torch.random.get_rng_state()
    sum(model(image=IMAGES, mode="loss").values()).backward()
    assert torch.equal(torch.random.get_rng_state(), random)
    assert dict(model.named_parameters()).keys() == before.keys()
    assert [name for name, p in before.items() if p.requires_grad != (p.grad is not None)] == []
