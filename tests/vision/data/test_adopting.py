"""What goes from a run to those that use its weights: rows of a head go by the names of classes."""

from __future__ import annotations

from pathlib import Path

import torch

from exp.engine.building import Weights
from exp.vision.data.base import fit_classes
from exp.vision.dinov3 import SceneClassifier, Segmenter

SMALL = {"embed_dim": 32, "depth": 4, "num_heads": 2}


def test_rows_of_a_head_go_by_the_names_of_classes_and_others_begin_anew():
    upsample = Segmenter(3, **SMALL, head_channels=16, auxiliary_weight=0.4)
    of_scenes, of_pixels = {"head.weight", "head.bias"}, {"head.classify.weight", "auxiliary_head.classify.bias"}
    for model, last in ((SceneClassifier(3, **SMALL), of_scenes), (upsample, of_pixels)):
        said, before = [], model.state_dict()
        weights = Weights(Path("run/best.pth"), before, {"classes": ["a", "b", "c"]})
        after = fit_classes(weights, ["c", "a", "b"], said.append).state
        assert all(torch.equal(after[name], before[name][[2, 0, 1]]) for name in last)
        lost = before.keys() - fit_classes(weights, ["a", "b", "road"], said.append).state.keys()
        assert lost >= last
        assert all(model.may_start_anew(name) for name in lost)
        assert "same 3 classes in another order" in said[0]
        assert "other classes (a, b, c) than the data have (a, b, road)" in said[1]
