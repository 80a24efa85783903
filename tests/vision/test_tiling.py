"""Windows over images: averages where they overlap, in bands of rows and strips of columns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from exp.vision.tiling import InMemoryImage, Tiling, tta_logits, window_origins


def noise(height, width):
    return torch.randint(0, 256, (3, height, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def network():
    """Looks around each pixel; each window by itself, so that scores do not depend on what it is batched with."""
    torch.manual_seed(0)
    net = torch.nn.Conv2d(3, 6, 9, padding=4).requires_grad_(False)
    return lambda windows: torch.cat([net(window[None].float()) for window in windows])


@pytest.mark.parametrize(("extent", "expected"), [(32, [0]), (33, [0, 1]), (64, [0, 24, 32]), (80, [0, 24, 48])])
def test_windows_cover_an_image_to_its_end(extent, expected):
    assert window_origins(extent, 32, 24) == expected


def test_scaled_and_mirrored_copies_are_averaged():
    image, scores = noise(32, 48)[None], network()
    found = tta_logits(scores, image, [1.0, 0.5], flip=True)
    torch.testing.assert_close(found.sum(dim=1), torch.full((1, 32, 48), 4.0))  # four copies
    torch.testing.assert_close(tta_logits(scores, image.flip(-1), [1.0, 0.5], flip=True).flip(-1), found)
    torch.testing.assert_close(tta_logits(scores, image, [1.0], flip=False), scores(image))
    both = scores(image).softmax(dim=1) + scores(image.flip(-1)).flip(-1).softmax(dim=1)
    torch.testing.assert_close(tta_logits(scores, image, [1.0], flip=True), both)


def given(*probabilities):
    """A network whose scores are these probabilities of the second of two classes, whatever it sees: (h, w)."""
    second = torch.tensor(probabilities)
    return lambda windows: torch.stack([1.0 - second, second])[None].expand(len(windows), -1, -1, -1)


def test_scores_are_enlarged_before_a_class_is_chosen():
    """Worked out by hand: a border after the third of eight pixels, and perfect probabilities at half the size.

    Bilinear: 0, .125, .375, .625, .875, 1, 1, 1. Chosen at half the size, the border would be at the fourth pixel.
    """
    scores, image = given([0.0, 0.5, 1.0, 1.0]), InMemoryImage(torch.zeros(3, 1, 4))
    ((top, labels),) = Tiling("whole").rows(scores, 2, image, (1, 8))
    assert (top, labels.tolist()) == (0, [[0, 0, 0, 1, 1, 1, 1, 1]])
    down = given([0.0], [0.5], [1.0], [1.0])
    rows = list(Tiling("whole").rows(down, 2, InMemoryImage(torch.zeros(3, 4, 1)), (8, 1)))
    assert [labels.flatten().tolist() for _, labels in rows] == [[0, 0, 0, 1, 1, 1, 1, 1]]


RESIZED = [(131, 90), (262, 180), (260, 90), (131, 181), (90, 97), (65, 45), (7, 500)]


@pytest.mark.parametrize("row_block_bytes", [Tiling.row_block_bytes, 4 * 6 * 64 * 70, 1])
@pytest.mark.parametrize(("kind", "window", "overlap", "size", "resized"), [
    ("slide", 64, 0.25, (300, 210), [(300, 210)]), ("slide", 33, 0.6, (131, 20), [(131, 20)]),
    ("slide", 64, 0.0, (64, 300), [(64, 300)]), ("slide", 33, 0.6, (131, 90), RESIZED),
    ("whole", 33, 0.6, (131, 90), RESIZED),
])  # fmt: skip
def test_labels_are_of_the_means_over_all_windows_interpolated_as_torch_does(
    kind, window, overlap, size, resized, row_block_bytes
):
    """In any bands of rows and strips of columns; with windows of which some pixels see more than others."""
    pixels, scores, tiling = noise(*size), network(), Tiling(kind, window, overlap)
    tiling.row_block_bytes = row_block_bytes
    height, width = tiling.window_size(*size)
    total, count = torch.zeros(6, *size), torch.zeros(size)
    for top in window_origins(size[0], height, tiling.stride):
        for left in window_origins(size[1], width, tiling.stride):
            place = (slice(top, top + height), slice(left, left + width))
            total[(..., *place)] += scores(pixels[(None, ..., *place)])[0]
            count[place] += 1
    for wanted in resized:
        mean = (total / count)[None].double()
        expected = mean if wanted == size else F.interpolate(mean, wanted, mode="bilinear", align_corners=False)
        parts = list(tiling.rows(scores, 6, InMemoryImage(pixels), *([] if wanted == size else [wanted])))
        assert [top for top, _ in parts] == [sum(len(rows) for _, rows in parts[:n]) for n in range(len(parts))]
        assert torch.equal(torch.cat([rows for _, rows in parts]).long(), expected[0].argmax(dim=0)), wanted


def test_each_image_of_a_batch_gets_labels_of_its_own_size():
    images = torch.stack([F.pad(noise(20, 30), (0, 10, 0, 4)), noise(24, 40)])
    sizes, label_sizes = [(20, 30), (24, 40)], [(40, 60), (12, 50)]
    tiling, scores = Tiling("slide", 16, 0.5), network()
    labels = tiling.labels(scores, 6, images, sizes, 255, label_sizes)
    assert labels.shape == (2, 40, 60)
    for row, image, (height, width), size in zip(labels, images, sizes, label_sizes):
        alone = [part for _, part in tiling.rows(scores, 6, InMemoryImage(image[:, :height, :width]), size)]
        assert torch.equal(row[: size[0], : size[1]], torch.cat(alone))
    assert (labels[1, 12:] == 255).all()
    assert (labels[1, :, 50:] == 255).all()
