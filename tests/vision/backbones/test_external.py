"""Networks of timm and transformers. For timm, which is not installed, a stand-in with its interface."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from exp.errors import ConfigError, UnavailableError
from exp.vision.backbones.external import Timm, Transformers

needs_newer_python = pytest.mark.skipif(sys.version_info < (3, 9), reason="refused on Python 3.8")

TIMM = """
import torch
from torch import nn

def list_models():
    return ["resnet10", "swin_pico"]

def is_model(name):
    return name in list_models()

class FeatureListNet(nn.ModuleDict):  # names with underscores, as timm's
    def __init__(self, in_chans, channels_last=False):
        super().__init__({
            "stem_0": nn.Conv2d(in_chans, 4, 3, stride=2, padding=1), "stem_1": nn.BatchNorm2d(4),
            "layers_0": nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU()),
            "norm": nn.BatchNorm2d(8),
            "layers_1": nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 2, stride=2)),
            "head": nn.Linear(6, 2),
        })
        self.output_fmt = "Format.NHWC" if channels_last else "Format.NCHW"
        self.pretrained_cfg = {"mean": (0.5, 0.4, 0.3), "std": (0.1, 0.2, 0.2), "input_size": (3, 224, 224)}

    def forward(self, x):
        x = self["stem_1"](self["stem_0"](x))
        first = self["norm"](self["layers_0"](x))
        maps = [first, self["layers_1"](first)]
        return [x.permute(0, 2, 3, 1) for x in maps] if "NHWC" in self.output_fmt else maps

def create_model(name, pretrained, features_only, in_chans, depth=2):
    assert features_only and not pretrained
    if depth > 2:
        raise RuntimeError("no such depth")
    return FeatureListNet(in_chans, name.startswith("swin"))
"""


@pytest.fixture
def timm(tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text(TIMM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    yield
    sys.modules.pop("timm", None)


@needs_newer_python
@pytest.mark.parametrize("name", ["resnet10", "swin_pico"])
def test_timm(timm, name):
    backbone = Timm(name=name, in_channels=4)
    assert (backbone.level_channels, backbone.level_strides) == ([8, 6], [4, 8])
    assert backbone(torch.randn(2, 4, 13, 30)).maps[0].shape == (2, 6, 2, 4)
    backbone.select_levels(2)
    assert [x.shape[1] for x in backbone(torch.randn(2, 4, 16, 16)).maps] == [8, 6]
    layers = {name.split(".")[1]: backbone.layer_of(name) for name, _ in backbone.named_parameters()}
    assert layers == {"stem_0": 1, "stem_1": 1, "layers_0": 1, "norm": 1, "layers_1": 2, "head": 0}
    assert [name for name, p in backbone.named_parameters() if not p.requires_grad] == [
        "network.head.weight", "network.head.bias",
    ]  # fmt: skip
    assert backbone.network["stem_1"].num_batches_tracked == 2  # the measurement is not counted
    backbone.freeze_unused([0])
    assert not backbone.network["layers_1"][0].weight.requires_grad


@needs_newer_python
def test_timms_published_names(timm, tmp_path):
    source, backbone = Timm(name="resnet10"), Timm(name="resnet10")
    state = {name.replace("network.", "").replace("stem_", "stem.").replace("layers_", "layers."): value.clone() + 1
             for name, value in source.state_dict().items()}  # fmt: skip
    for prefix in ("", "model.", "teacher.backbone."):
        file = {**{prefix + name: value for name, value in state.items()}, "classifier.weight": torch.zeros(1)}
        found = backbone.adapt_state_dict(file, Path("w.pth"))
        assert list(found.others) == ["classifier.weight"]
        backbone.load_state_dict(found.weights)
        assert torch.equal(backbone.network["layers_1"][0].weight, source.network["layers_1"][0].weight + 1)
        assert found.statistics[0] == pytest.approx([127.5, 102.0, 76.5])
        assert found.statistics[1] == pytest.approx([25.5, 51.0, 51.0])
    assert backbone.adapt_state_dict({"blocks.0.weight": torch.ones(1)}, Path("w.pth")) is None
    (tmp_path / "config.json").write_text('{"architecture": "resnet10t"}')
    with pytest.raises(ConfigError, match="architecture=resnet10t, not resnet10"):
        backbone.adapt_state_dict(state, tmp_path / "model.safetensors")


@needs_newer_python
def test_names_that_timm_does_not_know(timm):
    with pytest.raises(ConfigError, match=r"model\.backbone\.name=resnet11.*resnet10"):
        Timm(name="resnet11")
    with pytest.raises(ConfigError, match="no such depth"):
        Timm(name="resnet10", options={"depth": 9})


@needs_newer_python
def test_transformers(transformers, tmp_path):
    keys = {"model_type": "resnet", "depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 4}
    keys["layer_type"] = "basic"
    backbone = Transformers(config=keys, in_channels=5)
    assert (backbone.level_channels, backbone.level_strides) == ([8, 16], [4, 8])
    assert {backbone.layer_of(name) for name, _ in backbone.named_parameters()} == {1, 2}
    theirs = transformers.ResNetForImageClassification(transformers.ResNetConfig(**{**keys, "num_channels": 5}))
    theirs.save_pretrained(tmp_path)
    again = Transformers(folder=str(tmp_path), in_channels=5).eval()
    found = again.adapt_state_dict(theirs.state_dict(), tmp_path / "model.safetensors")
    assert all(name.startswith("classifier.") for name in found.others)
    again.load_state_dict(found.weights)
    others = Transformers(config={**keys, "hidden_act": "silu"}, in_channels=5)
    with pytest.raises(ConfigError, match=r"config\.json.*hidden_act=relu, not silu"):
        others.adapt_state_dict(theirs.state_dict(), tmp_path / "model.safetensors")
    image = torch.randn(1, 5, 32, 32)
    with torch.no_grad():
        expected = theirs.eval().resnet(image).last_hidden_state
        torch.testing.assert_close(again(image).maps[0], expected)
    with pytest.raises(ConfigError, match="model_type=resnett"):
        Transformers(config={"model_type": "resnett"})
    with pytest.raises(ConfigError, match=r"config\.json"):
        Transformers(folder=str(tmp_path / "nothing"))


def test_what_is_missing_is_named(monkeypatch):
    for kind, name in ((Timm, "timm"), (Transformers, "transformers")):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
        with pytest.raises(UnavailableError, match=name):
            kind()
