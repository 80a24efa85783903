"""Windows over images: averages where they overlap, in bands of rows and strips of columns."""

from __future__ import annotations

import pytest
import torch

from exp.vision.tiling import InMemory, Tiling, augmented, window_origins


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


@pytest.mark.parametrize("band_bytes", [Tiling.band_bytes, 4 * 6 * 64 * 100, 1])
@pytest.mark.parametrize(("kind", "window", "overlap", "size"), [
    ("slide", 64, 0.25, (300, 210)),
    ("slide", 33, 0.6, (131, 20)),
    ("slide", 64, 0.0, (64, 300)),
    ("whole", 8, 0.0, (90, 120)),
])  # fmt: skip
def test_labels_are_of_the_means_over_all_windows(kind, window, overlap, size, band_bytes):
    """Beside the mean of all windows over the whole image; in strips of a few columns, too."""
    pixels, scores, tiling = noise(*size), network(), Tiling(kind, window, overlap)
    tiling.band_bytes = band_bytes
    height, width = tiling.window_of(*size)
    total = torch.zeros(6, *size)
    for top in window_origins(size[0], height, tiling.stride):
        for left in window_origins(size[1], width, tiling.stride):
            place = (slice(top, top + height), slice(left, left + width))
            total[(..., *place)] += scores(pixels[(None, ..., *place)])[0]
    parts = list(tiling.rows(scores, 6, InMemory(pixels)))
    assert [top for top, _ in parts] == [sum(len(rows) for _, rows in parts[:n]) for n in range(len(parts))]
    assert torch.equal(torch.cat([rows for _, rows in parts]).long(), total.argmax(dim=0))


def test_scaled_and_mirrored_copies_are_averaged():
    image, scores = noise(32, 48)[None], network()
    found = augmented(scores, image, [1.0, 0.5], flip=True)
    torch.testing.assert_close(found.sum(dim=1), torch.full((1, 32, 48), 4.0))  # four copies
    torch.testing.assert_close(augmented(scores, image.flip(-1), [1.0, 0.5], flip=True).flip(-1), found)
    torch.testing.assert_close(augmented(scores, image, [1.0], flip=False), scores(image))
    both = scores(image).softmax(dim=1) + scores(image.flip(-1)).flip(-1).softmax(dim=1)
    torch.testing.assert_close(augmented(scores, image, [1.0], flip=True), both)
