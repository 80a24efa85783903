from __future__ import annotations

import numpy as np
import torch

from exp.engine.distributed import Distributed
from exp.vision.draw.components import Moments


def cloud():
    generator = torch.Generator().manual_seed(0)
    mix, _ = torch.linalg.qr(torch.randn(12, 12, generator=generator))
    return torch.randn(500, 12, generator=generator) * torch.tensor([8.0, 4.0, 2.0] + [0.5] * 9) @ mix + 100.0


def components_of(*parts):
    moments = Moments(12)
    for part in parts:
        moments.add(part)
    return moments.components(Distributed())


def test_components_are_those_of_the_singular_value_decomposition_in_whatever_order_images_come():
    features = cloud()
    components = components_of(*features.split(37))
    centred = (features - features.mean(dim=0)).double()
    _, values, axes = torch.linalg.svd(centred, full_matrices=False)
    cosines = (torch.from_numpy(components.axes).double() * axes[:3]).sum(dim=1)
    np.testing.assert_allclose(cosines.abs(), 1.0, atol=1e-5)
    np.testing.assert_allclose(components.deviation, values[:3] / len(features) ** 0.5, rtol=1e-4)
    np.testing.assert_allclose(components.explained, (values.square() / values.square().sum())[:3], rtol=1e-4)
    np.testing.assert_allclose(components_of(*reversed(features.split(50))).axes, components.axes, atol=1e-5)
    assert (components.axes[np.arange(3), np.abs(components.axes).argmax(axis=1)] > 0).all()


def test_a_feature_has_the_same_colour_in_every_image_and_the_mean_is_grey():
    components, grid = components_of(cloud()), cloud().numpy()[:12].reshape(3, 4, 12)
    np.testing.assert_allclose(components.rgb(grid)[1:, 1:], components.rgb(grid[1:, 1:]))
    along = components.mean + 2 * components.deviation[1] * components.axes[1]
    colors = components.rgb(np.stack([components.mean, along]).reshape(1, 2, 12))
    np.testing.assert_allclose(colors, [[[0.5, 0.5, 0.5], [0.5, 1.0, 0.5]]], atol=1e-3)


def test_a_map_has_the_image_s_size_and_its_patches_in_place():
    components = components_of(cloud())
    patches = np.zeros((3, 4, 12), np.float32) + components.mean
    patches[0, 2] += 5 * components.deviation[0] * components.axes[0]
    picture = components.picture(patches, 41, 50, 16)
    assert picture.shape == (41, 50, 3)
    row, column = np.unravel_index(picture[..., 0].argmax(), picture.shape[:2])
    assert (row // 16, column // 16) == (0, 2)
