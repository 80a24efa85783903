"""The patch embedding of three-band weights for other bands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exp.errors import ConfigError
from exp.vision.data.bands import colours_in
from exp.vision.dinov3 import SceneClassifier
from exp.vision.dinov3.bands import embedded

WEIGHT = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 2, 2).square()
SENTINEL = ["B04", "B03", "B02", "B08"]
SMALL = {"size": "tiny", "embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 4}


def test_red_green_and_blue_are_known_by_name():
    for names, places in (
        (["blue", "Green", "RED"], [2, 1, 0]),
        (["B8A", "B4", "B03", "B2"], [1, 2, 3]),
        (["4", "3", "2"], [None, None, None]),  # numbers of bands without a name say nothing
        (["red", "red", "blue"], [None, None, 2]),
    ):
        assert colours_in(names) == places


def test_kernels_of_other_bands():
    """A grey image keeps its embedding; known colours get their own kernels; other orders are not taken for RGB."""
    mean = WEIGHT.mean(dim=1)
    for channels in (1, 2, 4, 13):
        made = embedded(WEIGHT, channels, [], "auto", "x")
        torch.testing.assert_close(made, torch.stack([mean * 3 / channels] * channels, dim=1))
    made = embedded(WEIGHT, 4, ["B08", "B02", "B03", "B04"], "auto", "x")
    torch.testing.assert_close(made, torch.stack([mean, WEIGHT[:, 2], WEIGHT[:, 1], WEIGHT[:, 0]], dim=1) * 0.75)
    repeated = embedded(WEIGHT, 4, [], "repeat", "x")
    torch.testing.assert_close(repeated, WEIGHT[:, [0, 1, 2, 0]] * 0.75)
    zero = torch.cat([WEIGHT, torch.zeros_like(WEIGHT[:, :1])], dim=1)
    assert torch.equal(embedded(WEIGHT, 4, SENTINEL, "zero", "x"), zero)
    assert torch.equal(embedded(WEIGHT, 3, ["B02", "B03", "B04"], "auto", "x"), WEIGHT[:, [2, 1, 0]])
    assert torch.equal(embedded(WEIGHT, 3, ["B08", "B04", "B03"], "auto", "x"), WEIGHT)
    with pytest.raises(ConfigError, match=r"x\.pth"):  # five channels, of which nobody knows the colours
        embedded(torch.zeros(2, 5, 2, 2), 4, SENTINEL, "named", "x.pth")


def test_a_training_on_other_bands_begins_with_kernels_and_statistics_of_the_weights():
    theirs = SceneClassifier(3, **SMALL)
    state, source = dict(theirs.backbone.state_dict()), Path("dinov3_vits16_pretrain_sat493m.pth")
    kernel, mean = state["patch_embed.proj.weight"], [0.430, 0.411, 0.296]
    average = sum(mean) / 3
    model = SceneClassifier(3, in_channels=4, band_names=SENTINEL, **SMALL)
    own = model.fit_state_dict(model.adapt_state_dict(state, source), source)
    torch.testing.assert_close(own["backbone.patch_embed.proj.weight"][:, :3], kernel * 0.75)
    assert (own["pixel_mean"].flatten() / 255).tolist() == pytest.approx([*mean, average], abs=1e-6)
    given = SceneClassifier(3, in_channels=4, pixel_mean=[1.0, 2, 3, 4], pixel_std=[5.0, 6, 7, 8], **SMALL)
    assert given.adapt_state_dict(state, source)["pixel_mean"].flatten().tolist() == [1, 2, 3, 4]
    # Three bands in another order: for features, too, where nothing is made to fit.
    turned = SceneClassifier(3, band_names=["B02", "B03", "B04"], **SMALL).adapt_state_dict(state, source)
    assert torch.equal(turned["backbone.patch_embed.proj.weight"], kernel[:, [2, 1, 0]])
    # From a checkpoint of ours.
    ours = SceneClassifier(3, normalization="satellite", **SMALL).state_dict()
    model = SceneClassifier(3, in_channels=13, **SMALL)
    own = model.fit_state_dict(model.adapt_state_dict(ours, Path("best.pth")), Path("best.pth"))
    assert (own["pixel_mean"].flatten() / 255).tolist() == pytest.approx([average] * 13, abs=1e-6)
