"""A training that begins with weights of other classes: rows of a head go by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exp.engine.fit import Weights
from exp.vision.data.adopting import fit_classes
from exp.vision.dinov3 import SceneClassifier, Segmenter

SMALL = {"embed_dim": 32, "depth": 4, "num_heads": 2}
HEADS = {
    "scenes": lambda count: SceneClassifier(count, **SMALL),
    **{
        head: lambda count, head=head: Segmenter(count, **SMALL, head=head, head_channels=16, auxiliary_weight=0.4)
        for head in ("linear", "upsample", "upernet", "dpt")
    },
}


def fitted(model, theirs, mine):
    said = []
    weights = Weights(Path("run/best.pth"), model.state_dict(), {"classes": theirs})
    return fit_classes(weights, mine, said.append).state, said


@pytest.mark.parametrize("head", HEADS)
def test_the_same_classes_in_another_order_take_their_rows_with_them(head):
    model, own = HEADS[head](3), HEADS[head](3)
    state, said = fitted(model, ["a", "b", "c"], ["c", "a", "b"])
    assert len(said) == 1
    assert "same 3 classes in another order; the head's rows go by name" in said[0]
    own.load_state_dict(state)
    image = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        before, after = (each.eval()(image=image, mode="tensor") for each in (model, own))
    torch.testing.assert_close(after, before[:, [2, 0, 1]])
    if head != "scenes":
        rows = [each.auxiliary_head.classify.weight for each in (model, own)]
        assert torch.equal(rows[1], rows[0][[2, 0, 1]])


@pytest.mark.parametrize("head", HEADS)
def test_other_classes_begin_with_a_new_last_layer(head):
    model = HEADS[head](3)
    state, said = fitted(model, ["a", "b", "c"], ["a", "b", "road"])
    assert "other classes (a, b, c) than the data have (a, b, road); the head's last layer begins anew" in said[0]
    lost = model.state_dict().keys() - state.keys()
    whole = {"head.weight", "head.bias"} if head == "scenes" else set()
    assert lost == whole or lost == {f"{name}.classify.{kind}" for name in ("head", "auxiliary_head")
                                     for kind in ("weight", "bias")}  # fmt: skip
    assert all(model.may_start_anew(name) for name in lost)


def test_what_fits_or_cannot_be_told_stays_as_it_is():
    model = HEADS["scenes"](3)
    for theirs, mine in ((["a", "b", "c"], ["a", "b", "c"]), ([], ["a"]), (["a", "b", "c"], ["a", "b"])):
        state, said = fitted(model, theirs, mine)
        assert not said
        assert state.keys() == model.state_dict().keys()
    weights = Weights(Path("x.pth"), model.state_dict(), None)
    assert fit_classes(weights, ["a", "b", "x"], print) is weights
