"""A plain module as a model: the keys that it gets, its losses, and the messages where shapes or keys do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from exp.config.resolve import create, trust_packages
from exp.errors import ConfigError
from exp.models.base import Model

HERE = __name__


class Net(nn.Module):
    def __init__(self, num_classes: int, channels: int = 3) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels, num_classes, 1)

    def forward(self, image, scale=1.0):
        return {"logits": self.layer(image) * scale}


class Rows(nn.Module):
    def forward(self, a, b=None):
        return a if b is None else a - b


def distance(output, target, power=2.0):
    return ((output - target).abs() ** power).mean()


BATCH = {
    "image": torch.arange(24, dtype=torch.uint8).reshape(2, 3, 2, 2),
    "label": torch.tensor([[[0, 1], [255, 3]], [[1, 2], [3, 255]]], dtype=torch.uint8),
    "index": torch.arange(2),
}
ROWS = {"a": torch.tensor([[1.0, 2.0], [3.0, 5.0]]), "b": torch.ones(2, 2), "y": torch.zeros(2, 2)}
NET = {"module": {"_target_": f"{HERE}.Net"}, "loss": {"_target_": "torch.nn.CrossEntropyLoss"}, "output": "logits"}
MSE = {"_target_": "torch.nn.MSELoss"}


@pytest.fixture(autouse=True)
def _trusted():
    trust_packages([HERE.partition(".")[0]])
    yield
    trust_packages([])


def model_of(keys, **data):
    return create({"_target_": "exp.models.plain.PlainModel", **keys}, Model, "model", **data)


def rows(**keys):
    return model_of({"module": {"_target_": f"{HERE}.Rows"}, "loss": MSE, **keys})


def test_classes_and_the_ignored_label_come_from_the_data():
    model = model_of(NET, num_classes=4, ignore_index=255, in_channels=3)
    (value,) = model(**BATCH, mode="loss").values()
    expected = nn.functional.cross_entropy(
        model.network.layer(BATCH["image"].float()), BATCH["label"].long(), ignore_index=255
    )
    assert torch.equal(value, expected)
    assert model(**BATCH, mode="tensor").shape == (2, 4, 2, 2)
    chosen = model_of({**NET, "predict": "argmax"}, num_classes=4)
    assert chosen(**BATCH, mode="predict").shape == (2, 2, 2)
    softmax = model_of({**NET, "predict": "softmax"}, num_classes=4)
    assert torch.allclose(softmax(**BATCH, mode="predict").sum(dim=1), torch.ones(2, 2, 2))


def test_weights_of_classes_and_weights_of_losses():
    by_class = {"_target_": "torch.nn.CrossEntropyLoss", "weight": [1.0, 2.0, 0.5, 1.0]}
    function = {"_target_": "torch.nn.functional.cross_entropy", "weight": [1.0, 2.0, 0.5, 1.0]}
    model = model_of({**NET, "loss": {}, "losses": [{**MSE, "weight": 0}, by_class, function]}, num_classes=4)
    assert model.weights == [0.0, 1.0, 1.0]
    assert model.loss_names == ["loss_MSELoss", "loss_CrossEntropyLoss", "loss_cross_entropy"]
    target = {**BATCH, "label": BATCH["label"] % 4}
    values = [loss(torch.zeros(2, 4, 2, 2), target["label"].long()) for loss in model.losses[1:]]
    assert values[0] == values[1]
    assert {name for name, _ in model.named_buffers()} == {"losses.1.weight", "losses.2.weight"}
    two = rows(loss={}, losses=[{**MSE, "weight": 0.3}, {"_target_": "torch.nn.L1Loss", "weight": 0.7}])
    losses = two(**ROWS, mode="loss")  # of a - b = 0, 1, 2, 4
    assert {name: float(value) for name, value in losses.items()} == pytest.approx(
        {"loss_MSELoss": 0.3 * 21 / 4, "loss_L1Loss": 0.7 * 7 / 4}
    )


def test_inputs_by_signature_by_position_and_by_name():
    by_position = {"inputs": ["b", "a"]}
    for keys, expected in (({}, 10.5), (by_position, 7.5 / 1.0), ({"inputs": {"a": "b"}}, 1.0)):
        model = rows(**keys)
        value = float(model(**ROWS, mode="loss")["loss"])
        given = {"a": ROWS["a"] - ROWS["b"], "b": ROWS["b"] - ROWS["a"]}
        by_hand = {10.5: given["a"], 7.5: given["b"], 1.0: ROWS["b"]}[expected]
        assert value == pytest.approx(float(by_hand.square().mean()))
    own = rows(loss={"_target_": f"{HERE}.distance", "power": 1.0}, target="b")
    assert float(own(**ROWS, mode="loss")["loss"]) == pytest.approx(1.75)  # b is the target, and does not go in


def test_weights_of_the_module_alone_are_read():
    model = model_of({**NET, "loss": {**NET["loss"], "weight": [1.0, 1.0]}}, num_classes=2)
    alone = {f"module.{key}": value + 1 for key, value in model.network.state_dict().items()}
    adapted = model.adapt_state_dict(alone, None)
    assert adapted.keys() == model.state_dict().keys()
    assert torch.equal(adapted["network.layer.bias"], model.network.layer.bias + 1)
    again = model.adapt_state_dict(model.state_dict(), None)
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())


LINEAR = {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 1}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"inputs": ["z"]}, ("model.inputs", "z", "a, b, y")),
        ({"inputs": {"series": "a"}}, ("model.inputs", f"{HERE}.Rows", "series", "a, b")),
        ({"module": LINEAR}, ("torch.nn.modules.linear.Linear", "input", "a, b, y", "model.inputs=[")),
        ({"module": LINEAR, "inputs": ["a"]}, ("torch.nn.modules.linear.Linear", "a (2, 2)")),
        ({"module": {**LINEAR, "in_features": 2}, "inputs": ["a"]}, ("MSELoss", "(2, 1)", "y is (2, 2)")),
        ({"loss": {"_target_": "torch.nn.NLLLoss"}, "target": "b"}, (f"{HERE}.Rows", "NLLLoss", "b is (2, 2)")),
        ({"loss": {**MSE, "reduction": "none"}}, ("MSELoss", "shape (2, 2)")),
        ({"target": "z"}, ("model.target=z", "a, b, y")),
        ({"output": "out"}, ("model.output=out", f"{HERE}.Rows", "Tensor")),
        ({"predict": "best"}, ("model.predict=best", "argmax")),
        ({"loss": {}}, ("model.loss", "model.losses")),
        ({"losses": [MSE]}, ("model.loss", "model.losses")),
        ({"loss": {"_target_": f"{HERE}.distance", "powr": 1}}, ("model.loss.powr", "'power'")),
        ({"loss": {"_target_": f"{HERE}.pytest"}}, ("model.loss._target_",)),
        ({"loss": {"_target_": f"{HERE}.create"}}, ("model.loss._target_", "function")),
        ({"loss": {"_target_": "mmengine.fileio.remove"}}, ("model.loss._target_", "function")),
        ({"loss": {"_target_": "torch.nn.functional.importlib"}}, ("model.loss._target_", "function")),
        ({"module": {"_target_": f"{HERE}.distance"}}, ("model.module._target_", "torch.nn.modules.module.Module")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_with_class_and_shapes(keys, named):
    with pytest.raises(ConfigError) as refused:
        rows(**keys)(**ROWS, mode="loss")
    line = str(refused.value).splitlines()[0]
    assert [text for text in named if text not in line] == [], line
