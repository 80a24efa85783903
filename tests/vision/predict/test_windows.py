from __future__ import annotations

import numpy as np
import pytest
import torch

from exp.vision.predict.windows import Tiling, fade, label_rows, spans


class Picture:
    def __init__(self, pixels):
        self.pixels = pixels
        self.height, self.width = pixels.shape[:2]

    def read(self, top, left, height, width):
        part = self.pixels[top : top + height, left : left + width]
        assert part.shape[:2] == (height, width)
        return part


def noise(height, width, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def label_map(image, scores, num_classes, tiling):
    parts = list(label_rows(image, scores, num_classes, tiling))
    tops = [top for top, _ in parts]
    assert tops == [sum(len(rows) for _, rows in parts[:number]) for number in range(len(parts))]
    return np.concatenate([rows for _, rows in parts])


def whole_map(image, scores, num_classes, tiling):
    """Scores of the whole image, held at once."""
    height, width = min(tiling.window, image.height), min(tiling.window, image.width)
    weight = torch.from_numpy(np.outer(fade(height), fade(width)))
    total = torch.zeros(num_classes, image.height, image.width)
    for top in spans(image.height, height, tiling.overlap):
        for left in spans(image.width, width, tiling.overlap):
            window = image.read(top, left, height, width).transpose(2, 0, 1)
            found = scores(torch.from_numpy(window.copy()).unsqueeze(0))[0]
            total[:, top : top + height, left : left + width] += found * weight
    return total.argmax(dim=0).numpy()


def test_scores_behind_the_labels_are_means_over_windows():
    """Of a network that sees each pixel alone, they are its scores; in one strip of columns or in several."""
    image = Picture(noise(150, 230))

    def scores(windows):
        return windows.float() / 7.0

    for band_bytes in (2**28, 4 * 3 * 64 * 100):
        found = torch.full((3, 150, 230), float("nan"))

        def take(top, left, part, found=found):
            place = found[:, top : top + part.shape[1], left : left + part.shape[2]]
            assert torch.isnan(place).all(), "each pixel once"
            place[:] = part

        labels = np.concatenate(
            [rows for _, rows in label_rows(image, scores, 3, Tiling(64, 0.25, 8, band_bytes), take)]
        )
        torch.testing.assert_close(found, torch.from_numpy(image.pixels).permute(2, 0, 1) / 7.0, rtol=1e-4, atol=1e-4)
        settled = found.sort(dim=0).values[-2:].diff(dim=0)[0] > 1e-3
        assert (found.argmax(dim=0).numpy() == labels)[settled.numpy()].all()


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.9])
@pytest.mark.parametrize("extent", [1, 63, 64, 65, 127, 1000])
def test_windows_cover_everything_and_overlap_by_at_least_their_share(extent, overlap):
    begins = spans(extent, 64, overlap)
    assert begins[0] == 0
    assert begins[-1] == max(extent - 64, 0)
    steps = np.diff(begins)
    assert all(0 < step <= 64 * (1 - overlap) for step in steps)
    assert max(steps, default=0) - min(steps, default=0) <= 1


def test_fading_weights_of_half_overlapping_windows_add_up_to_the_same_everywhere():
    weight = fade(512)
    assert weight.min() > 0
    np.testing.assert_allclose(weight[:256] + weight[256:], 1.0, atol=2e-3)


@pytest.mark.parametrize("size", [(64, 64), (40, 64), (17, 3)])
def test_an_image_that_fits_into_a_window_is_seen_once_and_whole(size):
    shapes = []
    picture = Picture(noise(*size))
    net = torch.nn.Conv2d(3, 4, 5, padding=2)

    def scores(image):
        shapes.append(tuple(image.shape))
        return net(image.float()).detach()

    labels = label_map(picture, scores, 4, Tiling(64, 0.25))
    assert shapes == [(1, 3, *size)]
    direct = scores(torch.from_numpy(picture.pixels.transpose(2, 0, 1)).unsqueeze(0))[0].argmax(dim=0)
    assert (labels == direct.numpy()).all()


# The last one: strips of 64 columns, so that every window but the first touches two of them.
@pytest.mark.parametrize(
    "tiling", [Tiling(64, 0.25), Tiling(50, 0.0), Tiling(33, 0.6, at_once=3), Tiling(64, 0.25, band_bytes=1)]
)
@pytest.mark.parametrize("size", [(200, 301), (64, 500), (131, 20)])
def test_a_model_that_looks_at_one_pixel_gives_the_same_by_windows(size, tiling):
    picture = Picture(noise(*size))
    net = torch.nn.Conv2d(3, 6, 1)
    counts = []

    def scores(image):
        counts.append(len(image))
        with torch.no_grad():
            return net(image.float())

    labels = label_map(picture, scores, 6, tiling)
    direct = scores(torch.from_numpy(picture.pixels.transpose(2, 0, 1)).unsqueeze(0))[0].argmax(dim=0).numpy()
    # Sums of weighted scores round differently: a tie may fall to the other side.
    assert (labels == direct).mean() > 0.9999
    assert max(counts) <= tiling.at_once


def border_rows(overlap):
    """The row where the class changes, by column, for a model that errs one way at the left of a window, and the other
    way at its right."""
    height, width, window = 400, 512, 128

    def scores(image):
        difference = image[:, 0] / height - 0.5 + torch.linspace(-0.1, 0.1, window)
        return torch.stack([torch.zeros_like(difference), difference], dim=1)

    ramp = np.repeat(np.arange(height, dtype=np.float32)[:, None, None], width, axis=1)
    labels = label_map(Picture(ramp), scores, 2, Tiling(window, overlap))
    return (labels == 0).sum(axis=0)


def test_no_seams():
    assert np.abs(np.diff(border_rows(0.0))).max() > 60  # what windows side by side do
    assert np.abs(np.diff(border_rows(0.25))).max() <= 6
    assert np.abs(np.diff(border_rows(0.5))).max() <= 2


@pytest.mark.parametrize("tiling", [Tiling(64, 0.25), Tiling(33, 0.6), Tiling(64, 0.25, band_bytes=1)])
def test_rows_are_those_of_the_whole_image(tiling):
    """A model that looks around: its windows disagree where they overlap, and fade into one another."""
    torch.manual_seed(0)
    net = torch.nn.Conv2d(3, 6, 9, padding=4)
    picture = Picture(noise(300, 210))

    def scores(image):
        with torch.no_grad():
            return torch.cat([net(single.unsqueeze(0).float()) for single in image])  # whatever they are batched with

    np.testing.assert_array_equal(label_map(picture, scores, 6, tiling), whole_map(picture, scores, 6, tiling))
