"""Windows over images: averages where they overlap, in bands of rows and strips of columns."""

from __future__ import annotations

from pathlib import Path

import cv2
import pytest
import torch
import torch.nn.functional as F

from exp.vision.models import Segmenter
from exp.vision.tiling import InMemoryImage, Tiling, tta_logits, window_origins
from tests.vision.parts import head, vit

DUBAI = Path(__file__).parents[2] / "data" / "dubai"


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
    torch.testing.assert_close(found.sum(dim=1), torch.ones(1, 32, 48))
    torch.testing.assert_close(tta_logits(scores, image.flip(-1), [1.0, 0.5], flip=True).flip(-1), found)
    torch.testing.assert_close(tta_logits(scores, image, [1.0], flip=False), scores(image))
    both = scores(image).softmax(dim=1) + scores(image.flip(-1)).flip(-1).softmax(dim=1)
    torch.testing.assert_close(tta_logits(scores, image, [1.0], flip=True), both / 2)
    values = tta_logits(lambda x: 0.5 * x[:, :1].float(), image, [1.0], flip=True)  # one score is no class
    torch.testing.assert_close(values, 0.5 * image[:, :1].float())


def assembled(tiling, scores, classes, image, size=None):
    """The scores of all blocks, (K, H, W), each pixel once."""
    result = torch.full((classes, *(size or (image.height, image.width))), float("nan"))
    for top, left, block in tiling.blocks(scores, classes, image, size):
        place = result[:, top : top + block.shape[1], left : left + block.shape[2]]
        assert place.isnan().all()
        place[:] = block
    assert not result.isnan().any()
    return result


def given(*probabilities):
    """A network whose scores are these probabilities of the second of two classes, whatever it sees: (h, w)."""
    second = torch.tensor(probabilities)
    return lambda windows: torch.stack([1.0 - second, second])[None].expand(len(windows), -1, -1, -1)


def test_scores_are_enlarged_before_a_class_is_chosen():
    """Worked out by hand: a border after the third of eight pixels, and perfect probabilities at half the size.

    Bilinear: 0, .125, .375, .625, .875, 1, 1, 1. Chosen at half the size, the border would be at the fourth pixel.
    """
    scores, image = given([0.0, 0.5, 1.0, 1.0]), InMemoryImage(torch.zeros(3, 1, 4))
    labels = assembled(Tiling("whole"), scores, 2, image, (1, 8)).argmax(dim=0)
    assert labels.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]
    down = given([0.0], [0.5], [1.0], [1.0])
    labels = assembled(Tiling("whole"), down, 2, InMemoryImage(torch.zeros(3, 4, 1)), (8, 1)).argmax(dim=0)
    assert labels.flatten().tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


RESIZED = [(131, 90), (262, 180), (260, 90), (131, 181), (90, 97), (65, 45), (7, 500)]


@pytest.mark.parametrize("row_block_bytes", [Tiling.row_block_bytes, 4 * 6 * 64 * 70, 1])
@pytest.mark.parametrize(("kind", "window", "overlap", "size", "resized", "blend"), [
    ("slide", 64, 0.25, (300, 210), [(300, 210)], "hann"), ("slide", 33, 0.6, (131, 20), [(131, 20)], None),
    ("slide", 64, 0.0, (64, 300), [(64, 300)], None), ("slide", 33, 0.6, (131, 90), RESIZED, None),
    ("slide", 33, 0.6, (131, 90), RESIZED[1:3], "hann"), ("whole", 33, 0.6, (131, 90), RESIZED, "uniform"),
])  # fmt: skip
def test_labels_are_of_the_means_over_all_windows_interpolated_as_torch_does(
    kind, window, overlap, size, resized, blend, row_block_bytes
):
    """In any bands of rows and strips of columns; with windows of which some pixels see more than others."""
    pixels, scores, tiling = noise(*size), network(), Tiling(kind, window, overlap, blend=blend)
    tiling.row_block_bytes = row_block_bytes
    height, width = tiling.window_size(*size)
    total, count = torch.zeros(6, *size), torch.zeros(size)
    uppers, lefts = window_origins(size[0], height, tiling.stride), window_origins(size[1], width, tiling.stride)
    weights = torch.outer(*(
        torch.sin(torch.arange(1, extent + 1) * torch.pi / (extent + 1)).square() if len(origins) > 1
        else torch.ones(extent) for origins, extent in ((uppers, height), (lefts, width))
    ))  # fmt: skip
    weights = weights if blend == "hann" else torch.ones_like(weights)
    for top in uppers:
        for left in lefts:
            place = (slice(top, top + height), slice(left, left + width))
            total[(..., *place)] += scores(pixels[(None, ..., *place)])[0] * weights
            count[place] += weights
    for wanted in resized:
        mean = (total / count)[None].double()
        expected = mean if wanted == size else F.interpolate(mean, wanted, mode="bilinear", align_corners=False)
        found = assembled(tiling, scores, 6, InMemoryImage(pixels), None if wanted == size else wanted)
        torch.testing.assert_close(found.double(), expected[0], rtol=1e-4, atol=1e-3)
        best = expected[0].topk(2, dim=0).values
        is_clear = best[0] - best[1] > 1e-3  # of equal scores either class is right
        assert torch.equal(found.argmax(dim=0)[is_clear], expected[0].argmax(dim=0)[is_clear]), wanted


def test_scores_do_not_jump_where_windows_end_if_they_are_blended():
    """A transformer, whose scores depend on all of the window: columns where windows begin or end, and the others."""
    torch.manual_seed(0)
    backbone = vit(embed_dim=32, depth=2, num_heads=2, layer_scale_init=1.0)
    model = Segmenter(4, backbone=backbone, head=head("Linear")).eval()
    photo = next(DUBAI.glob("tile1/images/*.jpg"))
    pixels = torch.from_numpy(cv2.imread(str(photo))).permute(2, 0, 1)[:, :224, :448]
    jumps = {}
    for blend in ("uniform", "hann"):
        tiling = Tiling("slide", 64, 0.25, blend=blend)
        with torch.no_grad():
            steps = assembled(tiling, model, 4, InMemoryImage(pixels)).diff(dim=2).abs().mean(dim=(0, 1))
        lefts = window_origins(448, 64, tiling.stride)
        is_border = torch.zeros(447, dtype=torch.bool)
        is_border[[column - 1 for column in {*lefts, *(left + 64 for left in lefts)} if 0 < column < 448]] = True
        jumps[blend] = float(steps[is_border].mean() / steps[~is_border].mean())
    assert jumps["uniform"] > 3, jumps
    assert jumps["hann"] < 1.3, jumps


def test_each_image_of_a_batch_gets_labels_of_its_own_size():
    images = torch.stack([F.pad(noise(20, 30), (0, 10, 0, 4)), noise(24, 40)])
    sizes, label_sizes = [(20, 30), (24, 40)], [(40, 60), (12, 50)]
    tiling, scores = Tiling("slide", 16, 0.5), network()
    labels = tiling.labels(scores, 6, images, sizes, 255, label_sizes)
    assert labels.shape == (2, 40, 60)
    for row, image, (height, width), size in zip(labels, images, sizes, label_sizes):
        alone = assembled(tiling, scores, 6, InMemoryImage(image[:, :height, :width]), size).argmax(dim=0)
        assert torch.equal(row[: size[0], : size[1]].long(), alone)
    assert (labels[1, 12:] == 255).all()
    assert (labels[1, :, 50:] == 255).all()
