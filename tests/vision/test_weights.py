"""Weights under the names by which the authors and timm publish them, made here from one random model.

Those of Hugging Face are read beside transformers. And their patch embedding for other bands.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from exp.errors import ConfigError
from exp.vision.models import SceneClassifier, adapt_to_bands
from tests.vision.parts import vit

SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}
DATA = ("in_channels", "band_names", "pixel_mean", "pixel_std")
TIMM = {"storage_tokens": "reg_token", "ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2", "mlp.w1": "mlp.fc1_g",
        "mlp.w2": "mlp.fc1_x", "mlp.w3": "mlp.fc2"}  # fmt: skip


def published(model, form="authors"):
    """The backbone's weights as the authors or timm name and pack them."""
    state = {key: value.clone() for key, value in model.backbone.state_dict().items()}
    dim, periods = state["cls_token"].shape[-1], state.pop("rope.periods")
    biases = [key for key in state if key.endswith("qkv.bias")]
    if form == "authors":
        masks = {f"{key}_mask": torch.cat([torch.ones(dim), torch.zeros(dim), torch.ones(dim)]) for key in biases}
        return {**state, **masks, "mask_token": torch.zeros(1, dim), "rope_embed.periods": periods}
    for key in biases:
        query, _, value = state.pop(key).chunk(3)
        state.update({key.replace("qkv.bias", "q_bias"): query, key.replace("qkv.bias", "v_bias"): value})
    for ours, theirs in TIMM.items():
        state = {key.replace(ours, theirs): value for key, value in state.items()}
    return state


def scenes(normalization="auto", **settings):
    data = {key: settings.pop(key) for key in DATA if key in settings}
    return SceneClassifier(3, backbone=vit(**{**SMALL, **settings}), normalization=normalization, **data)


def loaded(state, name="w.pth", **settings):
    """A model with the weights of a file, and which of them it lacks or has too many."""
    model = scenes(**settings)
    return model, model.load_state_dict(model.adapt_state_dict(state, Path(name)), strict=False)


@pytest.mark.parametrize("form", ["authors", "timm"])
def test_both_forms_are_read_bare_and_as_a_part_of_another_model(form):
    for size, prefix in (("vits16", ""), ("vits16plus", "backbone."), ("vits16", "teacher.backbone.")):
        source = scenes(size=size)
        for name, parameter in source.backbone.named_parameters():
            parameter.data.normal_()
            if name.endswith("qkv.bias"):  # the bias of keys is not kept by all
                parameter.data.chunk(3)[1].zero_()
        state = {prefix + key: value for key, value in published(source, form).items()}
        state.update({"head.weight": torch.zeros(3, 64), "decode_head.conv_seg.weight": torch.zeros(1)})
        if "teacher" in prefix:
            student = {key.replace("teacher", "student"): torch.zeros_like(value) for key, value in state.items()}
            state = {**student, **state}
        target, left = loaded(state, size=size)
        assert left.missing_keys == ["head.weight", "head.bias"]  # another model's head is none of ours
        assert "decode_head.conv_seg.weight" in left.unexpected_keys
        torch.testing.assert_close(dict(target.backbone.state_dict()), dict(source.backbone.state_dict()))
        assert list(target.unverifiable_keys) == (
            [] if form == "authors" else ["backbone.num_heads"]
        )  # whose files have periods


def test_normalisation_follows_the_weights():
    for name, normalization, mean in (
        ("dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth", "auto", 0.430),
        ("dinov3_vitl16_pretrain_lvd1689m-8aa4cbdd.pth", "auto", 0.485),
        ("dinov3-vitl16-pretrain-sat493m/model.safetensors", "web", 0.485),
        ("unknown.pth", "satellite", 0.430),
    ):
        model, _ = loaded(published(scenes()), name, normalization=normalization)
        again, _ = loaded(model.state_dict())  # our own checkpoints bring theirs
        assert again.pixel_mean[0, 0].item() == pytest.approx(mean * 255)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "w.pth", "model.safetensors"])
def test_what_stands_beside_weights_counts_in_any_format(tmp_path, name):
    """Statistics in 0..1, as the processor of satellite weights has them; times 255 they are the model's."""
    satellite = {"image_mean": [0.430, 0.411, 0.296], "image_std": [0.213, 0.156, 0.143]}
    state, path = published(scenes(), "timm"), str(tmp_path / name)

    def read(processor, **config):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
        (tmp_path / "config.json").write_text(json.dumps(config))
        model, _ = loaded(state, path)
        return model, model.pixel_mean.flatten().tolist(), model.pixel_std.flatten().tolist()

    for rescale in ({}, {"do_rescale": True, "rescale_factor": 1 / 255}):
        model, mean, std = read({**satellite, **rescale}, num_attention_heads=2)
        assert mean == pytest.approx([109.65, 104.805, 75.48])
        assert std == pytest.approx([54.315, 39.78, 36.465])
        assert (model.normalization, model.unverifiable_keys) == ("satellite", [])
    assert read({**satellite, "do_rescale": False})[1] == pytest.approx([0.430, 0.411, 0.296])
    assert read({**satellite, "do_normalize": False})[1:] == ([0.0] * 3, pytest.approx([255.0] * 3))
    model, mean, _ = read({}, pretrained_cfg={"mean": [0.5, 0.4, 0.3], "std": [0.1, 0.1, 0.1]}, rope_theta=16.0)
    assert mean == pytest.approx([127.5, 102.0, 76.5])
    assert model.normalization == "own"
    # 16 ** (2 i / 8) of heads of 16 elements
    assert model.backbone.rope.periods.tolist() == pytest.approx([1.0, 2.0, 4.0, 8.0])
    with pytest.raises(ConfigError, match=r"model\.backbone\.num_heads=4"):
        read({}, num_attention_heads=4)
    with pytest.raises(ConfigError, match="dinov3_convnext"):
        read({}, model_type="dinov3_convnext")


@pytest.mark.parametrize("name", [
    "downsample_layers.0.0.weight", "stages.0.0.dwconv.weight", "stages.3.blocks.2.conv_dw.weight",
    "model.stages.1.layers.0.depthwise_conv.weight", "teacher.backbone.stages.0.0.dwconv.bias",
])  # fmt: skip
def test_a_convnext_is_named(name):
    with pytest.raises(ConfigError, match="ConvNeXt"):
        loaded({name: torch.ones(1), "norms.3.weight": torch.ones(1)})


def test_weights_of_another_size_name_the_keys_that_mend_it():
    ours, whole = scenes().state_dict(), SceneClassifier(3, backbone=vit(size="vits16"))
    for settings, state, key in (
        ({"size": "vits16plus"}, published(whole), "model.backbone.size=vits16"),
        ({"depth": 3}, ours, "model.backbone.depth=2"),
        ({"num_heads": 4}, ours, "model.backbone.num_heads=2"),
        ({"size": "vits16plus"}, ours, "model.backbone.size=tiny"),
        ({"patch_size": 8}, published(scenes()), "model.backbone.patch_size=16"),
        # Without periods the number of heads is the published one.
        (
            {"embed_dim": None, "depth": None, "num_heads": 12},
            published(whole, "timm"),
            "model.backbone.num_heads=null",
        ),
    ):
        with pytest.raises(ConfigError, match=key):
            loaded(state, **settings)


# The first element of each patch's features, as transformers 5.23 computes them from the weights below.
EXACT = [0.986143, 0.978883, 0.905008, 1.022316]
ROUNDED = [0.986144, 0.978887, 0.906337, 1.022290]


def test_periods_of_the_file_are_honoured():
    """They are rounded to bfloat16 in the authors' files."""

    def waves(*shape, start=0):
        numbers = torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64)
        return numbers.square().sin().float().view(shape)

    def features_of(model):
        with torch.no_grad():
            return model.eval().backbone(waves(1, 3, 32, 32)).maps[0][:, 0].flatten().tolist()

    source, resumed = scenes(), scenes()
    for number, parameter in enumerate(source.backbone.parameters()):
        parameter.data.copy_(waves(*parameter.shape, start=number))
    state = published(source)
    state["rope_embed.periods"] = state["rope_embed.periods"].bfloat16()
    ours = loaded(state)[0].state_dict()
    features_of(resumed)  # tables made before the weights came are not kept
    for state, expected in ((ours, ROUNDED), (source.state_dict(), EXACT)):
        resumed.load_state_dict(state)
        for again in (resumed, loaded(state)[0]):
            assert features_of(again) == pytest.approx(expected, abs=2e-5)


def test_other_backbones_are_refused_by_name():
    ours, state, one = scenes().state_dict(), published(scenes(), "timm"), torch.ones(1)
    bare = {key: value for key, value in state.items() if not key.endswith(("q_bias", "v_bias"))}
    for other, name in (
        ({**state, "pos_embed": one}, "DINOv2.*pos_embed"),
        ({"x.embeddings.register_tokens": one, "x.embeddings.position_embeddings": one}, "position_embeddings"),
        ({**state, "blocks.1.attn.q_norm.weight": one}, "q_norm"),
        ({**ours, "backbone.cls_norm.weight": one}, "cls_norm"),
    ):
        with pytest.raises(ConfigError, match=name):
            loaded(other)
    model, left = loaded({**bare, "decoder.pos_embed": one})  # of another part
    assert left.missing_keys == ["head.weight", "head.bias"]
    assert model.backbone.blocks[1].attn.qkv.bias.abs().max() == 0  # which timm leaves out where all are zero


WEIGHT = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 2, 2).square()
SENTINEL = ["B04", "B03", "B02", "B08"]


def test_kernels_of_other_bands():
    """All bands have the mean; known colors get their own kernels; other orders are not taken for RGB."""
    mean = WEIGHT.mean(dim=1)
    for channels in (1, 2, 4, 13):
        torch.testing.assert_close(adapt_to_bands(WEIGHT, channels, []), torch.stack([mean] * channels, dim=1))
    made = adapt_to_bands(WEIGHT, 4, ["B08", "B02", "B03", "B04"])
    torch.testing.assert_close(made, torch.stack([mean, WEIGHT[:, 2], WEIGHT[:, 1], WEIGHT[:, 0]], dim=1))
    assert torch.equal(adapt_to_bands(WEIGHT, 3, ["B02", "B03", "B04"]), WEIGHT[:, [2, 1, 0]])
    assert torch.equal(adapt_to_bands(WEIGHT, 3, ["B08", "B04", "B03"]), WEIGHT)


def test_a_training_on_other_bands_begins_with_kernels_and_statistics_of_the_weights():
    state, source = published(scenes()), Path("dinov3_vits16_pretrain_sat493m.pth")
    kernel, mean, average = state["patch_embed.proj.weight"], [0.430, 0.411, 0.296], (0.430 + 0.411 + 0.296) / 3
    model = scenes(in_channels=4, band_names=SENTINEL)
    own = model.fit_state_dict(model.adapt_state_dict(state, source), source)
    found = own["backbone.patch_embed.proj.weight"]
    torch.testing.assert_close(
        (found[:, :3], found.sum(dim=1)), (kernel * 0.75, kernel.sum(dim=1))
    )  # gray is as before
    assert (own["pixel_mean"].flatten() / 255).tolist() == pytest.approx([*mean, average], abs=1e-6)
    given = scenes(in_channels=4, pixel_mean=[1.0, 2, 3, 4], pixel_std=[5.0, 6, 7, 8])
    assert given.adapt_state_dict(state, source)["pixel_mean"].flatten().tolist() == [1, 2, 3, 4]
    # Three bands in another order: for features, too, where nothing is made to fit.
    turned = scenes(band_names=["B02", "B03", "B04"]).adapt_state_dict(state, source)
    assert torch.equal(turned["backbone.patch_embed.proj.weight"], kernel[:, [2, 1, 0]])
    # From a checkpoint of ours.
    ours, model = scenes(normalization="satellite").state_dict(), scenes(in_channels=13)
    own = model.fit_state_dict(model.adapt_state_dict(ours, source), source)
    assert (own["pixel_mean"].flatten() / 255).tolist() == pytest.approx([average] * 13, abs=1e-6)
