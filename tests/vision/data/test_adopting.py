"""What goes from a run to those that use its weights: rows of a head go by the names of classes."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from exp.engine.fit import Weights
from exp.vision.data.adopting import fit_classes
from exp.vision.dinov3 import SceneClassifier, Segmenter
from exp.vision.export import input_of

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


def test_what_goes_in_is_told_as_it_was_read(scenes, tmp_path):
    """Bands, what of their values becomes 0 and 255, and what stands for no data."""
    for number in range(20):
        path = tmp_path / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        cv2.imwrite(str(path), np.random.default_rng(number).integers(0, 4000, (16, 16, 3)).astype(np.uint16))
    wanted = {"root": str(tmp_path), "bands": [3, 1], "mean": "train"}
    for more, said in (
        ({"value_range": [0, 4000]}, {"value_range": [0, 4000], "bytes_too": False, "stretch": None}),
        ({"stretch": [2, 98]}, {"bytes_too": True, "stretch": {"percentiles": [2.0, 98.0], "scope": "train"}}),
        ({"stretch": [2, 98], "stretch_scope": "image"}, {"value_range": None, "bytes_too": True}),
    ):
        data = scenes(**wanted, **more)
        data.normalisation.settle()
        data.meet(SceneClassifier(size="tiny", depth=1, **data.model_arguments()))
        told = input_of(data)
        assert json.loads(json.dumps(told)) == told
        assert told["bands"] in ([3, 1], ["blue", "red"])
        assert {key: told[key] for key in said} == said
        assert len(told["no_data"]) == 2
        assert 100 < min(told["no_data"]) < 155
        if "stretch" in more and more.get("stretch_scope") is None:
            lows, highs = told["value_range"]
            assert max(lows) < 200
            assert min(highs) > 3800
    plain = input_of(scenes(root=str(tmp_path), value_range=[0, 1]))
    assert plain["bands"] is None
