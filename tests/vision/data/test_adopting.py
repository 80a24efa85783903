"""What goes from a run to those that use its weights: rows of a head go by the names of classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exp.engine.building import Weights
from exp.vision.data.base import fit_classes
from exp.vision.dinov3 import SceneClassifier, Segmenter

SMALL = {"embed_dim": 32, "depth": 4, "num_heads": 2}


def model_of(head):
    if head == "scenes":
        return SceneClassifier(3, **SMALL)
    return Segmenter(3, **SMALL, head=head, head_channels=16, auxiliary_weight=0.4)


def fitted(model, theirs, mine):
    said = []
    weights = Weights(Path("run/best.pth"), model.state_dict(), theirs and {"classes": theirs})
    return fit_classes(weights, mine, said.append).state, said


@pytest.mark.parametrize("head", ["scenes", "linear", "upsample", "upernet", "dpt"])
def test_rows_of_a_head_go_by_the_names_of_classes_and_others_begin_anew(head):
    model, own = model_of(head), model_of(head)
    state, said = fitted(model, ["a", "b", "c"], ["c", "a", "b"])
    assert "same 3 classes in another order" in said[0]
    own.load_state_dict(state)
    image = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        before, after = (each.eval()(image=image, mode="tensor") for each in (model, own))
    torch.testing.assert_close(after, before[:, [2, 0, 1]])
    last = {"head.weight", "head.bias"}
    if head != "scenes":
        rows = [each.auxiliary_head.classify.weight for each in (model, own)]
        assert torch.equal(rows[1], rows[0][[2, 0, 1]])
        last = {f"{name}.classify.{kind}" for name in ("head", "auxiliary_head") for kind in ("weight", "bias")}
    state, said = fitted(model, ["a", "b", "c"], ["a", "b", "road"])
    assert "other classes (a, b, c) than the data have (a, b, road)" in said[0]
    assert model.state_dict().keys() - state.keys() == last
    assert all(model.may_start_anew(name) for name in last)
