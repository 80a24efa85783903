from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from exp.predict.windows import Tiling, fade, label_map, spans
from tests.conftest import clean_environment


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

    labels = np.full(size, 99, np.uint8)
    label_map(picture, scores, 4, Tiling(64, 0.25), labels)
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

    labels = np.full(size, 99, np.uint8)
    label_map(picture, scores, 6, tiling, labels)
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
    labels = np.zeros((height, width), np.uint8)
    label_map(Picture(ramp), scores, 2, Tiling(window, overlap), labels)
    return (labels == 0).sum(axis=0)


def test_no_seams():
    assert np.abs(np.diff(border_rows(0.0))).max() > 60  # what windows side by side do
    assert np.abs(np.diff(border_rows(0.25))).max() <= 6
    assert np.abs(np.diff(border_rows(0.5))).max() <= 2


@pytest.mark.slow
def test_the_memory_of_a_large_image_is_bounded():
    """6000 x 6000 pixels, 8 classes: scores of the whole image would be 1.15 GB."""
    script = """
        import resource, numpy as np, torch
        from exp.predict.windows import Tiling, label_map
        class Picture:
            height = width = 6000
            pixels = np.zeros((6000, 6000, 3), np.uint8)
            def read(self, top, left, height, width):
                return self.pixels[top : top + height, left : left + width]
        def scores(image):
            return image[:, :1].float().expand(-1, 8, -1, -1)
        labels = np.ones((6000, 6000), np.uint8)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        label_map(Picture(), scores, 8, Tiling(512, 0.25), labels)
        assert not labels.any()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=clean_environment(), capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 500
