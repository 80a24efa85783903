"""Weights under the three kinds of names by which they are published, made here from one random model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from exp.errors import ConfigError
from exp.vision.dinov3 import SceneClassifier, Segmenter
from exp.vision.dinov3.blocks import rope_periods
from exp.vision.dinov3.huggingface import model_tensors

SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}
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
    if form == "hugging face":
        return model_tensors(state, model.size.gated)  # which transformers reads in another test
    biases = [key for key in state if key.endswith("qkv.bias")]
    periods = state.pop("rope.periods")
    if form == "authors":
        masks = {f"{key}_mask": torch.cat([torch.ones(dim), torch.zeros(dim), torch.ones(dim)]) for key in biases}
        return {**state, **masks, "mask_token": torch.zeros(1, dim), "rope_embed.periods": periods}
    for key in biases:
        query, _, value = state.pop(key).chunk(3)
        state.update({key.replace("qkv.bias", "q_bias"): query, key.replace("qkv.bias", "v_bias"): value})
    for ours, theirs in TIMM.items():
        state = {key.replace(ours, theirs): value for key, value in state.items()}
    return state


def randomised(model):
    torch.manual_seed(1)
    for name, parameter in model.backbone.named_parameters():
        parameter.data.normal_()
        if name.endswith("qkv.bias"):  # the bias of keys is not kept by all
            parameter.data.chunk(3)[1].zero_()
    return model


@pytest.mark.parametrize("form", ["authors", "hugging face", "timm"])
def test_every_form_is_read_bare_and_as_a_part_of_another_model(form):
    for size, prefix in (("vits16", ""), ("vits16plus", "backbone."), ("vits16", "encoder."),
                         ("vits16plus", "teacher.backbone.")):  # fmt: skip
        source = randomised(SceneClassifier(3, size=size, **SMALL))
        state = {prefix + key: value for key, value in published(source, form).items()}
        state.update({"head.weight": torch.zeros(3, 64), "decode_head.conv_seg.weight": torch.zeros(1)})
        if "teacher" in prefix:
            student = {key.replace("teacher", "student"): torch.zeros_like(value) for key, value in state.items()}
            state = {**student, **state}
        target = SceneClassifier(3, size=size, **SMALL)
        left = target.load_state_dict(target.adapt_state_dict(state, Path("w.pth")), strict=False)
        assert left.missing_keys == ["head.weight", "head.bias"]  # another model's head is none of ours
        assert "decode_head.conv_seg.weight" in left.unexpected_keys
        torch.testing.assert_close(
            dict(target.backbone.state_dict()), dict(source.backbone.state_dict()), rtol=0, atol=0
        )
        assert list(target.taken_on_trust) == ([] if form == "authors" else ["num_heads"])  # whose files have periods
    if form == "timm":  # which leaves out biases that are zero
        state = {key: value for key, value in state.items() if not key.endswith(("q_bias", "v_bias"))}
        assert target.adapt_state_dict(state, Path("w.pth"))["backbone.blocks.1.attn.qkv.bias"].abs().max() == 0


@pytest.mark.parametrize("prefix", ["", "teacher."])
def test_our_own_weights_are_found_under_any_path(prefix):
    state, target = dict(randomised(SceneClassifier(3, **SMALL)).state_dict()), SceneClassifier(3, **SMALL)
    target.load_state_dict(target.adapt_state_dict({prefix + key: each for key, each in state.items()}, Path("w.pth")))
    torch.testing.assert_close(dict(target.state_dict()), state, rtol=0, atol=0)


def test_normalisation_follows_the_weights():
    for name, normalization, mean in (
        ("dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth", "auto", 0.430),
        ("dinov3_vitl16_pretrain_lvd1689m-8aa4cbdd.pth", "auto", 0.485),
        ("dinov3-vitl16-pretrain-sat493m/model.safetensors", "web", 0.485),
        ("unknown.pth", "satellite", 0.430),
    ):
        model = SceneClassifier(3, normalization=normalization, **SMALL)
        model.load_state_dict(model.adapt_state_dict(published(model, "authors"), Path(name)), strict=False)
        again = SceneClassifier(3, **SMALL)  # our own checkpoints bring theirs
        again.load_state_dict(again.adapt_state_dict(model.state_dict(), Path("best.pth")))
        assert again.pixel_mean[0, 0].item() == pytest.approx(mean * 255)


def test_weights_of_another_size_name_the_keys_that_mend_it():
    whole = SceneClassifier(3, size="vits16")
    vits16, in_parts = (published(whole, form) for form in ("authors", "hugging face"))  # the latter has no periods
    for settings, state, key in (
        ({"size": "vits16plus"}, vits16, "model.size=vits16"),
        ({"depth": 3}, SceneClassifier(3, **SMALL).state_dict(), "model.depth=2"),
        ({"num_heads": 4}, SceneClassifier(3, **SMALL).state_dict(), "model.num_heads=2"),
        ({"size": "vits16plus"}, SceneClassifier(3, **SMALL).state_dict(), "model.size=tiny"),
        ({"patch_size": 8}, published(SceneClassifier(3, **SMALL), "authors"), "model.patch_size=16"),
        ({"embed_dim": None, "depth": None, "num_heads": 12}, in_parts, "model.num_heads=null"),
    ):
        with pytest.raises(ConfigError, match=key):
            SceneClassifier(3, **{**SMALL, **settings}).adapt_state_dict(state, Path("w.pth"))


def plain_features(state, heads, image):
    """The patch features from the authors' own tensors, written out: one image of 32 x 32, patches of 16, MLP."""

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-5)

    def linear(x, name, bias=1.0):
        return x @ state[f"{name}.weight"].t() + state[f"{name}.bias"] * bias

    def rotated(x):
        centres = torch.tensor([-0.5, 0.5])
        rows, columns = torch.meshgrid(centres, centres)
        places = torch.stack([rows.flatten(), columns.flatten()], dim=1)[:, :, None]  # (4, 2, 1)
        angles = (2 * math.pi * places / state["rope_embed.periods"].float()).flatten(1).repeat(1, 2)
        first, second = x[:, 5:].chunk(2, dim=-1)
        turned = x[:, 5:] * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
        return torch.cat([x[:, :5], turned], dim=1)

    patches = F.conv2d(image, state["patch_embed.proj.weight"], state["patch_embed.proj.bias"], stride=16)[0]
    x = torch.cat([state["cls_token"][0], state["storage_tokens"][0], patches.flatten(1).t()])
    for index in range(2):
        name = f"blocks.{index}"
        qkv = linear(norm(x, f"{name}.norm1"), f"{name}.attn.qkv", state[f"{name}.attn.qkv.bias_mask"])
        query, key, value = qkv.view(len(x), 3, heads, -1).permute(1, 2, 0, 3)
        weights = (rotated(query) @ rotated(key).transpose(1, 2) * query.shape[-1] ** -0.5).softmax(-1)
        mixed = (weights @ value).transpose(0, 1).flatten(1)
        x = x + linear(mixed, f"{name}.attn.proj") * state[f"{name}.ls1.gamma"]
        hidden = F.gelu(linear(norm(x, f"{name}.norm2"), f"{name}.mlp.fc1"))
        x = x + linear(hidden, f"{name}.mlp.fc2") * state[f"{name}.ls2.gamma"]
    return norm(x, "norm")[5:]


def test_periods_of_the_file_are_honoured():
    """They are rounded to bfloat16 in the authors' files."""
    torch.manual_seed(0)
    source = SceneClassifier(3, layer_scale=1.0, **SMALL)
    for name, parameter in source.backbone.named_parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3 if "attn.qkv" in name else 0.02)
    state = {key: value.clone() for key, value in published(source, "authors").items()}
    state["rope_embed.periods"] = state["rope_embed.periods"].bfloat16()
    image = torch.randn(1, 3, 32, 32)
    expected = plain_features(state, 2, image)
    exact = plain_features({**state, "rope_embed.periods": rope_periods(16)}, 2, image)
    assert (expected - exact).abs().max() > 1e-5

    def features_of(model):
        with torch.no_grad():
            return model.eval().backbone(image)[0].patches[0].flatten(0, 1)

    torch.testing.assert_close(features_of(source), exact, rtol=0, atol=1e-6)
    model = SceneClassifier(3, **SMALL)
    features_of(model)  # tables made before the weights came are not kept
    model.load_state_dict(model.adapt_state_dict(state, Path("w.pth")), strict=False)
    torch.testing.assert_close(features_of(model), expected, rtol=0, atol=1e-6)

    ours, resumed, started = model.state_dict(), SceneClassifier(3, **SMALL), SceneClassifier(3, **SMALL)
    before = {key: value for key, value in ours.items() if "periods" not in key}  # as we wrote before they were kept
    for state, features in ((ours, expected), (before, exact)):
        resumed.load_state_dict(state)
        started.load_state_dict(started.adapt_state_dict(state, Path("best.pth")))
        for again in (resumed, started):
            torch.testing.assert_close(features_of(again), features, rtol=0, atol=1e-6)


def test_other_backbones_are_refused_by_name():
    model, one = SceneClassifier(3, **SMALL), torch.ones(1)
    state, in_parts = published(model, "timm"), published(model, "hugging face")
    packed = {f"backbone.{key}": value for key, value in state.items() if not key.endswith(("q_bias", "v_bias"))}
    for other, name in (
        ({"stages.0.blocks.0.conv_dw.weight": one}, "ConvNeXt"),
        ({"model.stages.0.layers.0.depthwise_conv.weight": one}, "ConvNeXt"),
        ({"backbone.stages.3.2.dwconv.bias": one}, "ConvNeXt"),
        ({**state, "pos_embed": one}, "DINOv2"),
        ({f"backbone.{key}": value for key, value in {**in_parts, "embeddings.position_embeddings": one}.items()},
         "DINOv2"),
        ({"cls_token": one, "pos_embed": one, "blocks.0.attn.qkv.weight": one}, "pos_embed"),
        ({"backbone.layers.0.attn.attn.in_proj_weight": one, "backbone.pos_embed": one}, "DINOv3ViT"),
        ({**state, "blocks.1.attn.q_norm.weight": one}, "q_norm"),
        ({**model.state_dict(), "backbone.cls_norm.weight": one}, "cls_norm"),
        ({"backbone.blocks.0.attn.qkv.bias": torch.ones(96), **packed}, r"qkv\.bias"),  # of keys, too, and no mask
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            model.adapt_state_dict(other, Path("other.pth"))
    adapted = model.adapt_state_dict({**state, "decoder.pos_embed": one}, Path("w.pth"))  # of another part
    assert model.load_state_dict(adapted, strict=False).missing_keys == ["head.weight", "head.bias"]


def test_a_model_of_more_channels_starts_from_ours_but_is_never_evaluated_so():
    source = randomised(SceneClassifier(3, normalization="satellite", **SMALL))
    target = SceneClassifier(3, in_channels=13, **SMALL)
    adapted = target.adapt_state_dict(source.state_dict(), Path("best.pth"))
    assert mend(target, adapted) == {"data.channels": 3}
    target.load_state_dict(target.fit_state_dict(adapted, Path("best.pth")))
    grey = torch.randn(1, 1, 32, 32)
    expected = source.backbone.patch_embed(grey.expand(-1, 3, -1, -1))
    actual = target.backbone.patch_embed(grey.expand(-1, 13, -1, -1))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert target.pixel_mean.flatten().tolist() == pytest.approx([255 * (0.430 + 0.411 + 0.296) / 3] * 13)


def mend(model, state):
    """The keys that the weights tell otherwise than the model."""
    own = model.settings_of(model.state_dict())
    return {key: value for key, value in model.settings_of(state).items() if key in own and own[key] != value}


def test_weights_tell_their_settings():
    model = Segmenter(3, head="linear", size="vits16plus", **SMALL)
    assert model.settings_of(model.state_dict()) == {
        "model.size": "vits16plus", "model.embed_dim": 32, "model.depth": 2, "model.num_heads": 2, "data.channels": 3,
        "model.patch_size": 16, "data.classes": "<3 names>", "model.head": "linear", "model.blocks": "<1 blocks>",
        "model.auxiliary_weight": 0.0, "model.lora.rank": 0,
    }  # fmt: skip
    other = Segmenter(4, size="vits16plus", head_channels=8, blocks=[0, 1], auxiliary_weight=0.4, **SMALL).state_dict()
    assert mend(model, model.adapt_state_dict(other, Path("best.pth"))) == {
        "data.classes": "<4 names>", "model.head": "upsample", "model.blocks": "<2 blocks>",
        "model.auxiliary_weight": "<above 0>",
    }  # fmt: skip
    other = SceneClassifier(7, blocks=[0, 1], **SMALL).state_dict()
    assert mend(SceneClassifier(3, **SMALL), other) == {"data.classes": "<7 names>", "model.blocks": "<2 blocks>"}
