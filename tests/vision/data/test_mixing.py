"""MixUp and CutMix: what is made of two samples, and that batches, ranks and resuming do not change it."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch

from exp.errors import ConfigError
from exp.vision.losses import CrossEntropy, Loss, Losses
from tests.vision.data.conftest import CROP, keys
from tests.vision.parts import loss


@pytest.fixture
def thirty(scenes, tmp_path, noise):
    """Makes a data set of three classes of ten images, without a pipeline."""
    for number in range(30):
        noise(tmp_path / "abc"[number % 3] / f"{number}.png", 24, 30, seed=number)
    return lambda **values: scenes(**{"root": str(tmp_path), **values})


def raw(data):
    """Images of the training split, (N, H, W, C), and labels (N,)."""
    images = np.stack([cv2.imread(path)[..., ::-1] for path, _ in data.train.samples])
    return images, np.array([label for _, label in data.train.samples])


def test_mixup_is_the_mean_of_two_images_and_of_their_labels(thirty):
    data = thirty(mixup_alpha=0.8)
    images, classes = raw(data)
    images = images.astype(float)
    batch = data.train[keys(*range(len(data.train)))]
    assert (batch["image"].dtype, batch["label"].dtype, batch["label"].shape) == (torch.uint8, torch.float32, (21, 3))
    torch.testing.assert_close(batch["label"].sum(dim=1), torch.ones(21))
    partners = []
    for number, (image, label) in enumerate(zip(batch["image"].permute(0, 2, 3, 1).numpy(), batch["label"].numpy())):
        own, fits = images[number], []
        for other in set(range(21)) - {number}:
            step = own - images[other]
            share = ((image - images[other]) * step).sum() / np.square(step).sum()
            mean = share * own + (1 - share) * images[other]
            if abs(image - mean).max() < 0.6:
                expected = share * np.eye(3)[classes[number]] + (1 - share) * np.eye(3)[classes[other]]
                np.testing.assert_allclose(label, expected, atol=2e-3)
                fits.append(other)
        partners += fits if len(fits) == 1 else []  # a share near 1 fits every partner
    assert len(partners) > 14
    assert len(set(partners)) > 5


def pasted(image, own, others):
    """The box of an image that is not its own, and the number of the image that it is of; None: there is no box."""
    rows, columns = np.nonzero((image != own).any(axis=2))
    if not len(rows):
        return None
    box = slice(rows.min(), rows.max() + 1), slice(columns.min(), columns.max() + 1)
    (other,) = [number for number, each in enumerate(others) if np.array_equal(image[box], each[box])]
    return box, other


def test_cutmix_pastes_a_box_and_shares_the_label_by_its_pixels(thirty):
    data = thirty(cutmix_alpha=1.0)
    images, classes = raw(data)
    batch = data.train[keys(*range(len(data.train)))]
    shares = []
    for number, (image, label) in enumerate(zip(batch["image"].permute(0, 2, 3, 1).numpy(), batch["label"].numpy())):
        found = pasted(image, images[number], images)
        box, other = found or ((slice(0, 0),) * 2, number)
        share = 1 - image[box].size / image.size
        np.testing.assert_allclose(label, share * np.eye(3)[classes[number]] + (1 - share) * np.eye(3)[classes[other]],
                                   atol=1e-6)  # fmt: skip
        shares.append(share)
    assert (min(shares) < 0.6, max(shares) > 0.8, len(set(shares)) > 10) == (True, True, True)


def test_cutmix_pastes_the_mask_with_the_image(segmentation, pairs):
    root = pairs(10, lambda number: np.random.default_rng(number).choice([0, 1, 255], (24, 30)))
    data = segmentation(root=root, classes=["x", "y"], cutmix_alpha=1.0)
    images, masks = (np.stack([cv2.imread(pair[part], flag) for pair in data.train.samples])
                     for part, flag in ((0, cv2.IMREAD_COLOR), (1, cv2.IMREAD_UNCHANGED)))  # fmt: skip
    batch, boxes = data.train[keys(*range(len(data.train)))], 0
    assert batch["label"].dtype == torch.uint8
    for number, (image, mask) in enumerate(zip(batch["image"].permute(0, 2, 3, 1).numpy(), batch["label"].numpy())):
        expected, found = masks[number].copy(), pasted(image[..., ::-1], images[number], images)
        if found:
            (box, other), boxes = found, boxes + 1
            expected[box] = masks[other][box]
        np.testing.assert_array_equal(mask, expected)
    assert boxes > 3


@pytest.mark.parametrize("alphas", [{"mixup_alpha": 0.4}, {"cutmix_alpha": 1.0},
                                    {"mixup_alpha": 0.4, "cutmix_alpha": 1.0, "mix_prob": 0.5}])  # fmt: skip
def test_the_partner_depends_on_seed_epoch_and_sample_only(thirty, alphas):
    data = thirty(train_pipeline=CROP, **alphas)
    together = data.train[keys(*range(21))]
    np.random.seed(1)
    for number in (4, 9, 2):
        alone = data.train[keys(number)]
        assert all(torch.equal(together[name][number], alone[name][0]) for name in ("image", "label"))
    other = data.train[keys(*range(21), epoch=1)], thirty(seed=1, train_pipeline=CROP, **alphas).train[keys(*range(21))]
    assert not any(torch.equal(together["label"], batch["label"]) for batch in other)
    assert (together["label"].max(dim=1)[0] == 1).any() or "mix_prob" not in alphas
    assert data.val[torch.arange(3)]["label"].dtype == torch.int64


def test_skipped_samples_are_ignored_and_their_partners_stay_whole(thirty):
    data = thirty(mixup_alpha=1.0, on_error="skip")
    for path, _ in data.train.samples[1:]:
        open(path, "wb").close()  # noqa: PTH123
    label = data.train[keys(0, 1)]["label"]
    assert label.sum(dim=1).tolist() == [1.0, 0.0]
    assert label[0].max() == 1.0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("class_weights", [None, [0.5, 2.0, 1.0]])
def test_the_loss_of_shares_is_that_of_both_labels(smoothing, class_weights):
    """As in the papers: share * L(first label) + (1 - share) * L(second label), for each sample."""
    entropy = CrossEntropy(label_smoothing=smoothing, class_weights=class_weights, ignore_index=-1)
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    first, second, share = torch.tensor([0, 1, 2, -1]), torch.tensor([2, 1, 0, -1]), torch.tensor([0.3, 0.5, 1.0, 0.0])
    weights, labels = torch.stack([share, 1 - share]), torch.stack([first, second])
    known = (labels >= 0).float().unsqueeze(-1)
    shares = (weights.unsqueeze(-1) * torch.nn.functional.one_hot(labels.clamp(min=0), 3) * known).sum(dim=0)
    rows = [slice(row, row + 1) for row in range(4)]
    parts = [part * entropy(logits[row], first[row]) + (1 - part) * entropy(logits[row], second[row])
             for row, part in zip(rows, share)]  # fmt: skip
    torch.testing.assert_close(entropy(logits, shares), torch.stack(parts).mean())


def test_what_does_not_fit_is_refused(segmentation, thirty, pairs):
    for keywords, said in (({"mix_prob": 1.5}, "mix_prob=1.5"), ({"cutmix_alpha": -1.0}, "cutmix_alpha")):
        with pytest.raises(ConfigError, match=said):
            thirty(**keywords)
    root = pairs(10, lambda number: np.zeros((20 + number % 2, 30)), "masked/images", "masked/masks")
    with pytest.raises(ConfigError, match=r"mixup_alpha.*cutmix_alpha"):
        segmentation(root=root, classes=["x"], mixup_alpha=1.0)
    with pytest.raises(ConfigError, match="different sizes"):
        segmentation(root=root, classes=["x"], cutmix_alpha=1.0).train[keys(*range(7))]
    with pytest.raises(ConfigError, match="Focal takes one class"):
        Losses([loss("Focal")], Loss, ignore_index=-1, class_weights=None)(torch.zeros(2, 3), torch.full((2, 3), 1 / 3))


@pytest.mark.extended
@pytest.mark.legacy
def test_a_training_is_the_same_on_two_ranks_and_after_resuming(exp):
    words = ["experiment=dinov3_eurosat", "backend=cpu", "plots=false", "data.num_workers=0", "global_batch_size=8",
             "max_epochs=null", "max_steps=6", "log_every=1", "checkpoint.every_steps=3", "checkpoint.keep_last=4",
             "data.mixup_alpha=0.4", "data.cutmix_alpha=1.0"]  # fmt: skip
    for name, more in (("one", []), ("two", ["nproc=2"]), ("half", ["resume=one/checkpoints/step_00000003.pth"])):
        done = exp(*words, *more, f"output_dir={name}")
        assert done.returncode == 0, done.stdout + done.stderr
    one = exp.losses("one")
    assert exp.losses("two") == pytest.approx(one, rel=1e-4)
    assert exp.losses("half") == {step: value for step, value in one.items() if step > 3}
