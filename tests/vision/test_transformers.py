"""The backbone computes what transformers' DINOv3ViTModel does, from the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from exp.engine.weights import read_weights
from exp.errors import ConfigError
from exp.vision.backbones.vit import VisionTransformer
from exp.vision.backbones.vit_weights import SIZES, Size
from exp.vision.export import processor_config
from exp.vision.models import SceneClassifier
from tests.vision.parts import vit

# Of the larger ones two blocks, of the largest one: all of them would take gigabytes, and minutes to make.
DEPTHS = {"vits16plus": 2, "vitb16": 2, "vitl16": 2, "vitl16plus": 2, "vith16plus": 2, "vit7b16": 1}


def make_reference(transformers, size, noise, **settings):
    """Their model, of no weight that is zero or one: these would hide mistakes."""
    torch.manual_seed(0)
    config = transformers.DINOv3ViTConfig(
        hidden_size=size.embed_dim, intermediate_size=size.hidden_dim, num_hidden_layers=size.depth,
        num_attention_heads=size.num_heads, num_register_tokens=size.storage_tokens, use_gated_mlp=size.gated,
        hidden_act="silu" if size.gated else "gelu", **settings,
    )  # fmt: skip
    reference = transformers.DINOv3ViTModel(config).eval()
    for parameter in reference.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=noise)
    return reference


@torch.no_grad()
def same_features(features, reference, pixels, tolerance=1e-5):
    expected = reference(pixels).last_hidden_state
    found = [features.cls[0], features.maps[0].flatten(2).transpose(1, 2)]
    torch.testing.assert_close(found, [expected[:, 0], expected[:, 5:]], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] * (name == "vit7b16")) for name in SIZES]
)
def test_every_size(transformers, name):
    size = Size(**{**SIZES[name].__dict__, "depth": DEPTHS.get(name, SIZES[name].depth)})
    reference, ours = make_reference(transformers, size, 0.02), VisionTransformer(size=name, depth=size.depth).eval()
    ours.load_state_dict(ours.adapt_state_dict(reference.state_dict(), Path("w.pth")).weights)
    image = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        features = ours(image)
    same_features(features, reference, image)
    assert features.maps[0].shape == (2, size.embed_dim, 4, 6)


def test_what_stands_beside_the_weights_counts(transformers, tmp_path):
    """Heads, the base of the rotary embedding and the normalization, which no tensor tells."""
    reference = make_reference(transformers, Size(48, 2, 4, 192), 0.3, rope_theta=20.0)
    reference.save_pretrained(tmp_path)
    mean, std = [0.430, 0.411, 0.296], [0.213, 0.156, 0.143]
    processor = {"image_mean": mean, "image_std": std, "rescale_factor": 1 / 128}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    weights = read_weights(tmp_path)

    def model():
        ours = SceneClassifier(3, backbone=vit(embed_dim=48, depth=2, num_heads=4)).eval()
        ours.load_state_dict(ours.adapt_state_dict(weights.state, weights.path), strict=False)
        return ours

    image = torch.randint(0, 256, (1, 3, 32, 48))
    pixels = (image / 128 - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    same_features(model().features(image), reference, pixels, 1e-4)
    for wrong in ({"model_type": "dinov2"}, {"layer_norm_eps": 1e-6}, {"hidden_act": "relu"}):
        (tmp_path / "config.json").write_text(json.dumps({**reference.config.to_dict(), **wrong}))
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            model()
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json"):
        model()


@pytest.mark.parametrize("size", ["vits16", "vits16plus"])
def test_transformers_reads_what_is_exported(transformers, tmp_path, size):
    torch.manual_seed(0)
    model = SceneClassifier(3, backbone=vit(size=size, embed_dim=32, depth=2, num_heads=2, layer_scale_init=1.0)).eval()
    backbone, image = model.backbone, torch.randint(0, 256, (2, 3, 64, 32))
    assert backbone.write_huggingface(tmp_path, 64, []) == ["rope.periods"]
    processor = processor_config(model.pixel_mean.flatten().tolist(), model.pixel_std.flatten().tolist(), 64)
    theirs, told = transformers.DINOv3ViTModel.from_pretrained(tmp_path, output_loading_info=True)
    assert [told["missing_keys"], told["unexpected_keys"]] == [set(), set()]
    mean, std = (torch.tensor(processor[key]).view(1, 3, 1, 1) for key in ("image_mean", "image_std"))
    pixels = (image * processor["rescale_factor"] - mean) / std
    same_features(model.features(image), theirs.eval(), pixels, 1e-4)
