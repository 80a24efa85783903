"""Weights under the three kinds of names by which they are published, made here from one random model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exp.errors import CheckpointError
from exp.models.dinov3 import SceneClassifier, Segmenter
from exp.models.dinov3.weights import adapt_published

SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}
HUGGING_FACE = {
    "cls_token": "embeddings.cls_token",
    "storage_tokens": "embeddings.register_tokens",
    "patch_embed.proj.": "embeddings.patch_embeddings.",
    "blocks.": "layer.",
    "attn.": "attention.",
    "attention.proj": "attention.o_proj",
    "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.up_proj",
    "mlp.w3": "mlp.down_proj",
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
}
TIMM = {
    "storage_tokens": "reg_token",
    "ls1.gamma": "gamma_1",
    "ls2.gamma": "gamma_2",
    "mlp.w1": "mlp.fc1_g",
    "mlp.w2": "mlp.fc1_x",
    "mlp.w3": "mlp.fc2",
}


def published(model, form):
    """The backbone's weights as the authors, Hugging Face or timm name and pack them."""
    state = {key: value.clone() for key, value in model.backbone.state_dict().items()}
    dim = state["cls_token"].shape[-1]
    if form == "authors":
        for key in [key for key in state if key.endswith("qkv.bias")]:
            state[f"{key}_mask"] = torch.cat([torch.ones(dim), torch.zeros(dim), torch.ones(dim)])
        return {**state, "mask_token": torch.zeros(1, dim), "rope_embed.periods": torch.ones(4)}
    renamed = {}
    for key, value in state.items():
        if ".qkv." in key:
            block, kind = key.split("qkv.")
            for name, part in zip("qkv", value.chunk(3)):
                if (name, kind) == ("k", "bias"):
                    continue
                if form == "hugging face":
                    renamed[f"{block}{name}_proj.{kind}"] = part
                elif kind == "bias":
                    renamed[f"{block}{name}_bias"] = part
            if form == "timm" and kind == "weight":
                renamed[key] = value
        else:
            renamed[key] = value
    for ours, theirs in (HUGGING_FACE if form == "hugging face" else TIMM).items():
        renamed = {key.replace(ours, theirs): value for key, value in renamed.items()}
    return renamed


def randomised(model):
    torch.manual_seed(1)
    for name, parameter in model.backbone.named_parameters():
        parameter.data.normal_()
        if name.endswith("qkv.bias"):  # the bias of keys is not kept by all
            parameter.data.chunk(3)[1].zero_()
    return model


@pytest.mark.parametrize("size", ["vits16", "vits16plus"])
@pytest.mark.parametrize("form", ["authors", "hugging face", "timm"])
def test_every_form_is_read(form, size):
    source = randomised(SceneClassifier(3, size=size, **SMALL))
    target = SceneClassifier(3, size=size, **SMALL)
    state = target.adapt_state_dict(published(source, form), Path("weights.pth"))
    left = target.load_state_dict(state, strict=False)
    assert left.unexpected_keys == []
    assert left.missing_keys == ["head.weight", "head.bias"]
    for (name, mine), theirs in zip(target.backbone.state_dict().items(), source.backbone.state_dict().values()):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=name)


def test_biases_that_timm_leaves_out_are_zero():
    source = randomised(SceneClassifier(3, **SMALL))
    state = {key: value for key, value in published(source, "timm").items() if not key.endswith(("q_bias", "v_bias"))}
    assert adapt_published(state)["blocks.1.attn.qkv.bias"].abs().max() == 0


@pytest.mark.parametrize(
    ("name", "normalization", "mean"),
    [
        ("dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth", "auto", 0.430),
        ("dinov3_vitl16_pretrain_lvd1689m-8aa4cbdd.pth", "auto", 0.485),
        ("dinov3-vitl16-pretrain-sat493m/model.safetensors", "auto", 0.430),
        ("dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth", "web", 0.485),
        ("unknown.pth", "auto", 0.485),
        ("unknown.pth", "satellite", 0.430),
    ],
)
def test_normalisation_follows_the_weights(name, normalization, mean):
    model = SceneClassifier(3, normalization=normalization, **SMALL)
    state = model.adapt_state_dict(published(model, "authors"), Path(name))
    model.load_state_dict(state, strict=False)
    assert model.pixel_mean[0, 0].item() == pytest.approx(mean * 255)
    again = SceneClassifier(3, **SMALL)  # our own checkpoints bring theirs
    again.load_state_dict(again.adapt_state_dict(model.state_dict(), Path("best.pth")))
    assert again.pixel_mean[0, 0].item() == pytest.approx(mean * 255)


def test_the_wrong_size_is_refused_by_name():
    state = published(SceneClassifier(3, size="vits16"), "authors")
    with pytest.raises(CheckpointError) as error:
        SceneClassifier(3, size="vits16plus", **SMALL).adapt_state_dict(state, Path("dinov3_vits16.pth"))
    line = str(error.value).splitlines()[0]
    assert "dinov3_vits16.pth holds vits16 (384 wide, 12 blocks, MLP 1536)" in line
    assert "but the model is a model 32 wide, 2 blocks, SwiGLU 128" in line
    assert "set model.size=vits16" in line


def test_our_own_weights_of_another_size_are_refused():
    state = Segmenter(3, **SMALL).state_dict()
    with pytest.raises(CheckpointError, match="holds a model 32 wide, 2 blocks"):
        Segmenter(3, embed_dim=32, depth=3, num_heads=2).adapt_state_dict(state, Path("best.pth"))


def test_another_patch_size_is_refused():
    state = published(SceneClassifier(3, **SMALL), "authors")
    with pytest.raises(CheckpointError, match=r"has patches of 16 pixels, the model of 8; set model\.patch_size=16"):
        SceneClassifier(3, patch_size=8, **SMALL).adapt_state_dict(state, Path("weights.pth"))


@pytest.mark.parametrize("channels", [1, 5])
def test_a_grey_image_is_embedded_alike_for_any_number_of_channels(channels):
    source = randomised(SceneClassifier(3, **SMALL))
    target = SceneClassifier(3, in_channels=channels, **SMALL)
    target.load_state_dict(target.adapt_state_dict(published(source, "authors"), Path("w.pth")), strict=False)
    grey = torch.randn(1, 1, 32, 32)
    expected = source.backbone.patch_embed(grey.expand(-1, 3, -1, -1))
    torch.testing.assert_close(
        target.backbone.patch_embed(grey.expand(-1, channels, -1, -1)), expected, rtol=1e-4, atol=1e-4
    )
