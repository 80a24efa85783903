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


@pytest.mark.parametrize("theirs", [["a", "b", "x"], [], ["a", "b"], None])
def test_what_fits_or_cannot_be_told_stays_as_it_is(theirs):
    model = model_of("scenes")
    state, said = fitted(model, theirs, ["a", "b", "x"])
    assert not said
    assert state.keys() == model.state_dict().keys()


@pytest.mark.parametrize(("more", "expected"), [
    ({"value_range": [0, 4000]}, {"value_range": [0, 4000], "bytes_too": False, "stretch": None}),
    ({"stretch": [2, 98]}, {"bytes_too": True, "stretch": {"percentiles": [2.0, 98.0], "scope": "train"}}),
    ({"stretch": [2, 98], "stretch_scope": "image"}, {"value_range": None, "bytes_too": True}),
])  # fmt: skip
def test_what_goes_in_is_told_as_it_was_read(scenes, tmp_path, more, expected):
    """Bands, what of their values becomes 0 and 255, and what stands for no data."""
    for number in range(20):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        values = np.random.default_rng(number).integers(0, 4000, (16, 16, 3)).astype(np.uint16)
        cv2.imwrite(str(tmp_path / "ab"[number % 2] / f"{number}.png"), values)
    data = scenes(root=str(tmp_path), bands=[3, 1], mean="train", **more)
    data.normalisation.settle()
    data.meet(SceneClassifier(size="tiny", depth=1, **data.model_arguments()))
    told = input_of(data)
    assert json.loads(json.dumps(told)) == told
    assert told["bands"] in ([3, 1], ["blue", "red"])
    assert {key: told[key] for key in expected} == expected
    np.testing.assert_allclose(told["no_data"], [127.5, 127.5], atol=27.5)
    if more == {"stretch": [2, 98]}:
        np.testing.assert_allclose(told["value_range"], [[80, 80], [3920, 3920]], atol=120)
