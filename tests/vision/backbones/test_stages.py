"""What ConvNeXt and the mix transformer have in common: four stages, published names, and any card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError
from exp.models.dropout import DropPath
from exp.vision.backbones import convnext, segformer
from exp.vision.backbones.convnext import ConvNext
from exp.vision.backbones.segformer import MixTransformer

SMALL = {ConvNext: "atto", MixTransformer: "b0"}
both = pytest.mark.parametrize("kind", [ConvNext, MixTransformer])
# Published parameter counts in millions: arXiv 2201.03545 without the classifier, arXiv 2105.15203.
PUBLISHED = {
    (ConvNext, "tiny"): 27.8, (ConvNext, "small"): 49.5, (MixTransformer, "b0"): 3.4, (MixTransformer, "b1"): 13.1,
    (MixTransformer, "b2"): 24.2,
}  # fmt: skip


def make(kind, **keys):
    """A small backbone of no weight that is zero or one: these would hide mistakes."""
    torch.manual_seed(0)
    backbone = kind(**{"size": SMALL[kind], **keys})
    for parameter in backbone.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return backbone.eval()


def test_parameters_are_as_many_as_published():
    for (kind, size), millions in PUBLISHED.items():
        with torch.random.fork_rng():
            count = sum(parameter.numel() for parameter in kind(size=size).parameters())
        assert count / 1e6 == pytest.approx(millions, rel=0.025), size
    for kind in SMALL:
        with pytest.raises(ConfigError, match=r"model\.backbone\.size=b7"):
            kind(size="b7")


@both
def test_images_of_any_size_and_levels_in_any_order(kind):
    backbone, image = make(kind), torch.randn(1, 3, 33, 5)
    assert backbone.out_indices == [3]
    backbone.select_levels(4)
    features = backbone(image)
    assert [tuple(x.shape[1:]) for x in features.maps] == [
        (channels, 64 // stride, 32 // stride)
        for channels, stride in zip(backbone.level_channels, backbone.level_strides)
    ]
    padded = backbone(F.pad(image, (0, 27, 0, 31)), [3, 0])
    torch.testing.assert_close(padded.maps, [features.maps[3], features.maps[0]])
    assert backbone.has_cls is (features.cls is not None)
    if features.cls is not None:
        assert [x.shape for x in features.cls] == [(1, channels) for channels in backbone.level_channels]


@both
def test_each_parameter_belongs_to_the_first_level_that_depends_on_it(kind):
    backbone = make(kind)
    owners = {}
    for level in range(4):
        sum(x.sum() for x in backbone(torch.randn(1, 3, 32, 32), [level]).maps).backward()
        for name, parameter in backbone.named_parameters():
            if parameter.grad is not None:
                owners.setdefault(name, level + 1)
    layers = {name: backbone.layer_of(name) for name, _ in backbone.named_parameters()}
    stem = {name for name, layer in layers.items() if layer == 0}
    assert stem
    assert all(owners[name] == 1 for name in stem)
    assert owners == {**layers, **dict.fromkeys(stem, 1)}
    backbone.freeze_unused([1, 0])
    assert {name for name, p in backbone.named_parameters() if not p.requires_grad} == {
        name for name, level in owners.items() if level > 2
    }


@both
def test_recomputed_activations_and_reduced_precision_change_nothing_but_digits(kind):
    image = torch.randn(2, 3, 64, 64)
    grads = {}
    for recompute in (False, True):
        backbone = make(kind, activation_checkpointing=recompute).train()
        backbone(image).maps[0].square().mean().backward()
        grads[recompute] = {name: parameter.grad for name, parameter in backbone.named_parameters()}
    torch.testing.assert_close(grads[True], grads[False])
    backbone = make(kind)
    with torch.no_grad():
        expected = backbone(image).maps[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (found,) = backbone(image).maps
    assert found.dtype == torch.float32
    assert 0 < (found - expected).norm() / expected.norm() < 0.05


@both
def test_drop_path_grows_with_the_depth_and_keeps_the_mean(kind):
    backbone = make(kind, drop_path_rate=0.5)
    rates = [module.p for module in backbone.modules() if isinstance(module, DropPath)]
    assert rates == pytest.approx(torch.linspace(0, 0.5, len(rates)).tolist())
    branch = torch.ones(4000, 2, 3, 3)
    dropped = backbone.blocks[3][-1].drop_path.train()(branch)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert dropped.flatten(1).std(dim=1).max() == 0.0  # a whole sample or none of it
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.1)
    image = torch.randn(4, 3, 32, 32)
    assert not torch.equal(backbone.train()(image).maps[0], backbone(image).maps[0])


def as_convnext(name, form):
    """A name of ours as the authors, transformers and timm write it."""
    module, *rest = name.split(".")
    first = rest[0]
    if module == "norm":
        return {"authors": "norm.", "transformers": "layer_norm.", "timm": "head.norm."}[form] + first
    if form == "authors":
        return ".".join([{"downsample": "downsample_layers", "blocks": "stages"}[module], *rest])
    if form == "transformers":
        inner = {"downsample": "downsample_layers", "blocks": "layers"}[module]
        renamed = {"dwconv": "depthwise_conv", "norm": "layer_norm", "pwconv1": "pointwise_conv1",
                   "pwconv2": "pointwise_conv2"}  # fmt: skip
        return ".".join(["model.stages", first, inner, *(renamed.get(part, part) for part in rest[1:])])
    if module == "downsample":
        return ".".join(["stem" if first == "0" else f"stages.{first}.downsample", *rest[1:]])
    renamed = {"dwconv": "conv_dw", "pwconv1": "mlp.fc1", "pwconv2": "mlp.fc2"}
    return ".".join(["stages", first, "blocks", *(renamed.get(part, part) for part in rest[1:])])


def published_convnext(backbone, form):
    state = {as_convnext(name, form): value.clone() for name, value in backbone.state_dict().items()}
    if form == "authors":
        state.update({"norms.3.weight": state["norm.weight"].clone(), "norms.3.bias": state["norm.bias"].clone()})
    return state


def as_mit(name, form):
    module, stage, *rest = name.split(".")
    rest = ".".join(rest)
    if form == "mmsegmentation":
        part = {"embeds": "0", "blocks": "1", "norms": "2"}[module]
        renamed = [("attn.proj", "attn.attn.out_proj"), ("proj.", "projection."), ("out_projection", "out_proj"),
                   ("mlp.fc1", "ffn.layers.0"), ("mlp.dwconv", "ffn.layers.1"),
                   ("mlp.fc2", "ffn.layers.4")]  # fmt: skip
        for ours, theirs in renamed:
            rest = rest.replace(ours, theirs)
        return f"layers.{stage}.{part}.{rest}"
    if form == "authors":
        part = {"embeds": "patch_embed", "blocks": "block", "norms": "norm"}[module]
        return f"{part}{int(stage) + 1}.{rest.replace('dwconv', 'dwconv.dwconv')}"
    part = {"embeds": "patch_embeddings", "blocks": "block", "norms": "layer_norm"}[module]
    renamed = [("norm1", "layer_norm_1"), ("norm2", "layer_norm_2"), ("attn.proj", "attention.output.dense"),
               ("attn.q", "attention.self.query"), ("attn.sr", "attention.self.sr"),
               ("attn.norm", "attention.self.layer_norm"), ("mlp.fc", "mlp.dense"),
               ("dwconv", "dwconv.dwconv")]  # fmt: skip
    for ours, theirs in renamed:
        rest = rest.replace(ours, theirs)
    return f"encoder.{part}.{stage}.{rest.replace('norm.', 'layer_norm.') if module == 'embeds' else rest}"


def published_mit(backbone, form):
    state = {}
    for name, value in backbone.state_dict().items():
        value = value.clone()
        if form == "mmsegmentation" and name.endswith((".fc1.weight", ".fc2.weight")):
            value = value[:, :, None, None]
        if ".kv." in name and form == "mmsegmentation":
            query = backbone.state_dict()[name.replace(".kv.", ".q.")]
            block = as_mit(name, form).partition("attn.kv")[0]
            state[f"{block}attn.attn.in_proj_{name.rpartition('.')[2]}"] = torch.cat([query, value])
        elif ".kv." in name and form == "transformers":
            for part, half in zip(("key", "value"), value.chunk(2)):
                state[as_mit(name, form).replace("attn.kv", f"attention.self.{part}")] = half.clone()
        elif ".attn.q." not in name or form != "mmsegmentation":
            state[as_mit(name, form)] = value
    return state


# Names as they are in published files, one of each kind.
EXAMPLES = {
    "authors of ConvNeXt": ["downsample_layers.0.0.weight", "downsample_layers.3.1.bias", "stages.2.5.pwconv1.weight",
                            "stages.0.0.gamma", "norms.3.bias", "norm.weight"],
    "transformers of ConvNeXt": ["model.stages.0.downsample_layers.1.weight", "layer_norm.weight",
                                 "model.stages.2.layers.5.pointwise_conv2.bias", "model.stages.1.layers.0.gamma",
                                 "model.stages.3.layers.1.layer_norm.weight"],
    "timm of ConvNeXt": ["stem.0.weight", "stem.1.bias", "stages.3.downsample.0.weight", "head.norm.weight",
                         "stages.0.blocks.1.conv_dw.bias", "stages.2.blocks.0.mlp.fc2.weight"],
    "mmsegmentation of MiT": ["layers.0.0.projection.weight", "layers.3.0.norm.bias", "layers.0.1.1.attn.sr.weight",
                              "layers.2.1.0.attn.attn.in_proj_weight", "layers.2.1.0.attn.attn.out_proj.bias",
                              "layers.1.1.0.attn.norm.weight", "layers.3.1.1.ffn.layers.1.weight",
                              "layers.3.1.1.ffn.layers.4.bias", "layers.3.2.weight"],
    "transformers of MiT": ["encoder.patch_embeddings.0.layer_norm.bias", "encoder.block.3.1.attention.self.key.bias",
                            "encoder.block.0.1.attention.self.sr.weight", "encoder.layer_norm.2.weight",
                            "encoder.block.0.1.attention.self.layer_norm.bias", "encoder.block.0.0.layer_norm_1.weight",
                            "encoder.block.1.0.attention.output.dense.bias",
                            "encoder.block.1.0.mlp.dwconv.dwconv.weight", "encoder.block.1.0.mlp.dense2.bias"],
    "authors of MiT": ["patch_embed4.norm.weight", "block1.0.attn.kv.weight", "block3.1.mlp.dwconv.dwconv.bias",
                       "norm4.bias"],
}  # fmt: skip


@pytest.mark.parametrize("publication", EXAMPLES)
def test_published_names_are_read_bare_and_as_a_part_of_another_model(publication):
    form, _, network = publication.partition(" of ")
    kind, write = {"ConvNeXt": (ConvNext, published_convnext), "MiT": (MixTransformer, published_mit)}[network]
    source = make(kind)
    state = write(source, form)
    assert set(EXAMPLES[publication]) <= set(state)
    for prefix in ("", "backbone.", "teacher.backbone."):
        head = {"decode_head.conv_seg.weight": torch.zeros(1), f"{prefix}head.weight": torch.zeros(1)}
        file = {**{prefix + name: value for name, value in state.items()}, **head}
        if "teacher" in prefix:
            file.update({name.replace("teacher", "student"): torch.zeros(1) for name in file})
        keys = {"norm_eps": 1e-5} if publication == "transformers of MiT" else {}
        found = kind(size=SMALL[kind], **keys).adapt_state_dict(file, Path("w.pth"))
        torch.testing.assert_close(found.weights, dict(source.state_dict()), rtol=0, atol=0)
        assert set(head) <= set(found.others)
    source.check_state_dict(found.weights, Path("w.pth"))


@both
def test_other_weights_are_not_ours_and_those_of_another_size_name_it(kind):
    backbone = make(kind)
    other = {ConvNext: published_mit(make(MixTransformer), "authors"), MixTransformer: {"blocks.0.0.w": torch.ones(1)}}
    assert backbone.adapt_state_dict(other[kind], Path("w.pth")) is None
    assert backbone.adapt_state_dict(nn.Linear(2, 2).state_dict(), Path("w.pth")) is None
    larger = {ConvNext: "tiny", MixTransformer: "b1"}[kind]
    with pytest.raises(ConfigError, match=rf"w\.pth.*model\.backbone\.size={larger}"):
        backbone.check_state_dict(kind(size=larger).state_dict(), Path("w.pth"))
    with pytest.raises(ConfigError, match=r"of no size"):
        backbone.check_state_dict({}, Path("w.pth"))


def test_statistics_stand_beside_the_weights(tmp_path):
    backbone = make(MixTransformer, norm_eps=1e-5)
    state = published_mit(backbone, "transformers")
    assert backbone.adapt_state_dict(state, tmp_path / "model.safetensors").statistics is None
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.4], "image_std": [1, 1, 1]}')
    mean, std = backbone.adapt_state_dict(state, tmp_path / "model.safetensors").statistics
    assert mean == pytest.approx([25.5, 51.0, 102.0])
    assert std == pytest.approx([255.0] * 3)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json"):
        backbone.adapt_state_dict(state, tmp_path / "model.safetensors")


def test_attention_weights_of_the_mix_transformer():
    backbone = make(MixTransformer)
    first, last = backbone.attention(torch.randn(2, 3, 64, 96), [0, 3])
    assert (first.shape, last.shape) == ((2, 1, 16 * 24, 2 * 3), (2, 8, 2 * 3, 2 * 3))
    torch.testing.assert_close(first.sum(-1), torch.ones(2, 1, 16 * 24))


def test_same_as_transformers_convnext(transformers):
    torch.manual_seed(0)
    for size in ("atto", "tiny", "small", "base", "large"):
        depths, channels = convnext.SIZES[size]
        depths = tuple(min(depth, 2) for depth in depths) if size in ("base", "large") else depths
        config = transformers.DINOv3ConvNextConfig(depths=list(depths), hidden_sizes=list(channels))
        theirs = transformers.DINOv3ConvNextModel(config).eval()
        for parameter in theirs.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
        convnext.SIZES["tested"] = convnext.Size(depths, channels)
        try:
            ours = ConvNext(size="tested").eval()
        finally:
            del convnext.SIZES["tested"]
        found = ours.adapt_state_dict(theirs.state_dict(), Path("w.pth"))
        assert not found.others
        ours.load_state_dict(found.weights)
        image = torch.randn(2, 3, 64, 96)
        with torch.no_grad():
            expected = theirs(image, output_hidden_states=True)
            features = ours(image, [0, 1, 2, 3])
        torch.testing.assert_close(features.maps[:3], list(expected.hidden_states[-4:-1]), rtol=1e-5, atol=1e-5)
        tokens = torch.cat([features.cls[3].unsqueeze(1), features.maps[3].flatten(2).transpose(1, 2)], dim=1)
        torch.testing.assert_close(tokens, expected.last_hidden_state, rtol=1e-5, atol=1e-5)


def test_same_as_transformers_mix_transformer(transformers):
    torch.manual_seed(0)
    for size, (depths, dim) in segformer.SIZES.items():
        if size > "b2":
            continue
        config = transformers.SegformerConfig(
            depths=list(depths), hidden_sizes=[dim, 2 * dim, 5 * dim, 8 * dim], num_attention_heads=[1, 2, 5, 8]
        )
        theirs = transformers.SegformerModel(config).eval()
        for parameter in theirs.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
        ours = MixTransformer(size=size, norm_eps=1e-5).eval()  # theirs
        found = ours.adapt_state_dict(theirs.state_dict(), Path("w.pth"))
        assert not found.others
        ours.load_state_dict(found.weights)
        image = torch.randn(2, 3, 64, 96)
        with torch.no_grad():
            expected = theirs(image, output_hidden_states=True)
            features = ours(image, [0, 1, 2, 3])
        torch.testing.assert_close(features.maps, list(expected.hidden_states), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [ConvNext, MixTransformer])
def test_files_of_transformers_itself(transformers, tmp_path, kind):
    """The names that save_pretrained writes, which are not always those of its modules."""
    from exp.engine.weights import read_weights

    if kind is ConvNext:
        depths, channels = convnext.SIZES["atto"]
        config = transformers.DINOv3ConvNextConfig(depths=list(depths), hidden_sizes=list(channels))
        theirs = transformers.DINOv3ConvNextModel(config)
    else:
        config = transformers.SegformerConfig()
        theirs = transformers.SegformerForSemanticSegmentation(config)
    theirs.save_pretrained(tmp_path)
    weights, ours = read_weights(tmp_path), make(kind, **({"norm_eps": 1e-5} if kind is MixTransformer else {}))
    found = ours.adapt_state_dict(weights.state, weights.path)
    ours.load_state_dict(found.weights)
    assert all(name.startswith("decode_head.") for name in found.others)


def test_settings_that_tensors_do_not_show_are_those_of_the_weights(tmp_path):
    """transformers' code has 1e-5 in the layer norms of MiT, whatever its config.json says; mmsegmentation's 1e-6."""
    file = tmp_path / "model.safetensors"
    for form, right, wrong in (("transformers", 1e-5, 1e-6), ("mmsegmentation", 1e-6, 1e-5)):
        state = published_mit(make(MixTransformer), form)
        assert make(MixTransformer, norm_eps=right).adapt_state_dict(state, file) is not None
        with pytest.raises(ConfigError, match=rf"names of {form}.* set model\.backbone\.norm_eps={right:g}"):
            make(MixTransformer, norm_eps=wrong).adapt_state_dict(state, file)
    for kind, form, keys, wrong in (
        (MixTransformer, "authors", {"hidden_act": "gelu", "sr_ratios": [8, 4, 2, 1]}, {"sr_ratios": [4, 4, 2, 1]}),
        (ConvNext, "transformers", {"layer_norm_eps": 1e-6}, {"layer_norm_eps": 1e-12}),
        (ConvNext, "timm", {"model_args": {"norm_eps": 1e-6}}, {"model_args": {"norm_eps": 1e-5}}),
    ):
        backbone = make(kind)
        state = (published_mit if kind is MixTransformer else published_convnext)(backbone, form)
        (tmp_path / "config.json").write_text(json.dumps(keys))
        assert backbone.adapt_state_dict(state, file) is not None
        (tmp_path / "config.json").write_text(json.dumps({**keys, **wrong}))
        with pytest.raises(ConfigError, match=r"another network|norm_eps=1e-05"):
            backbone.adapt_state_dict(state, file)
