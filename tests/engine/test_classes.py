"""What goes from a run to a training that starts from its weights: rows of a head go by the names of classes."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from exp.config.resolve import trust_packages
from exp.engine.build import build_model
from exp.models.base import Model
from exp.session import Weights
from exp.vision.heads import Head
from tests.vision.parts import head, vit

SMALL = {"backbone": vit(embed_dim=32, depth=4, num_heads=2)}
OF_SCENES = {"_target_": "exp.vision.models.SceneClassifier", **SMALL}
OF_PIXELS = {
    "_target_": "exp.vision.models.Segmenter", **SMALL, "head": head("Upsample", channels=16), "auxiliary_weight": 0.4
}  # fmt: skip


class Mine(Model):
    """A head of a hidden layer that happens to have as many units as there are classes; the embedding has columns."""

    def __init__(self, num_classes, hidden=3):
        super().__init__()
        self.body, self.last = nn.Linear(4, hidden), nn.Linear(hidden, num_classes)
        self.names = nn.Parameter(torch.randn(2, num_classes))
        self.pairs = nn.Parameter(torch.randn(2 * num_classes))

    def forward(self, x, mode="tensor", **_):
        return self.last(self.body(x))


class Declared(Mine):
    class_rows = ("last.weight", "last.bias")


class Tall(Head):
    def __init__(self, info, num_classes):
        super().__init__(info, num_classes)
        self.layers = nn.Sequential(nn.Conv2d(info.channels[0], 3, 1), nn.Conv2d(3, num_classes, 1))


def started(make_session, model, old, new):
    """A model for the classes ``new``, started from weights for ``old``; these weights; and what was said."""
    trust_packages(["tests"])
    session = make_session(model=model)
    torch.manual_seed(0)
    arguments = {"num_classes": len(old)}
    before = build_model(session, SimpleNamespace(model_arguments=lambda: arguments)).state_dict()
    arguments["num_classes"] = len(new)
    session.weights = Weights(Path("run/best.pth"), before, {"classes": old})
    session.data_state, said = {"classes": new}, []
    session.print = said.append
    drawn = torch.random.get_rng_state(), random.getstate()
    after = build_model(session, SimpleNamespace(model_arguments=lambda: arguments)).state_dict()
    assert random.getstate() == drawn[1]
    return before, after, said[0]


AUXILIARY = ["auxiliary_head.classify.weight", "auxiliary_head.classify.bias"]


@pytest.mark.parametrize(("model", "rows"), [
    (OF_SCENES, ["head.weight", "head.bias"]),
    (OF_PIXELS, ["head.classify.weight", "head.classify.bias", *AUXILIARY]),
    ({**OF_PIXELS, "head": {"_target_": f"{__name__}.Tall"}},
     ["head.layers.1.weight", "head.layers.1.bias", *AUXILIARY]),
    ({"_target_": f"{__name__}.Declared"}, ["last.weight", "last.bias"]),
    ({"_target_": f"{__name__}.Mine"}, []),
])  # fmt: skip
def test_rows_of_a_head_go_by_the_names_of_classes_and_others_begin_anew(make_session, model, rows):
    before, after, said = started(make_session, model, ["a", "b", "c"], ["c", "a", "b"])
    anew = [] if rows else ["last.weight", "last.bias", "names", "pairs"]
    for name, value in before.items():
        same = value[[2, 0, 1]] if name in rows else value
        assert torch.equal(after[name], same) == (name not in anew), name
    assert ("same 3 classes in another order" in said) == (not anew)
    assert all(name in said for name in (*rows, *anew))
    before, after, said = started(make_session, model, ["a", "b", "c"], ["a", "b", "road"])
    for name, value in before.items():
        assert torch.equal(after[name], value) == (name not in (*rows, *anew) or not value.any()), name
    assert "other classes (a, b, c) than the data have (a, b, road)" in said
    if "last.bias" not in rows:  # it says that it has no other tensor of classes, and it has
        before, after, said = started(make_session, model, ["a", "b", "c"], ["a", "b"])
        assert "other classes (a, b, c) than the data have (a, b)" in said
