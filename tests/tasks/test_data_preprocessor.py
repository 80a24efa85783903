"""A model of MMEngine's own kind, with a data preprocessor: the same inputs wherever it is called."""

from __future__ import annotations

import json

import torch
from mmengine.model import BaseModel, ImgDataPreprocessor

from exp.engine.wrapper import forward, predictions, preprocessed
from tests.conftest import TINY

# Whatever a batch holds, the model is to see 100.
MINE = """
import json
import torch
from mmengine.model import BaseDataPreprocessor, BaseModel

class Hundred(BaseDataPreprocessor):
    def forward(self, data, training=False):
        data = self.cast_data(data)
        return {**data, "x": torch.full_like(data["x"], 100.0 + training)}

class Stock(BaseModel):
    def __init__(self, horizon, channels, **_):
        super().__init__(data_preprocessor=Hundred())
        self.level = torch.nn.Parameter(torch.zeros(horizon, channels))

    def forward(self, x, y=None, mode="tensor", **_):
        with open("inputs.jsonl", "a") as file:
            file.write(json.dumps([mode, x.min().item(), x.max().item()]) + chr(10))
        found = self.level.expand(x.shape[0], -1, -1)
        return {"loss": (found - y).square().mean()} if mode == "loss" else found
"""


def test_training_under_a_wrapper_and_evaluation_see_the_same(exp):
    (exp.folder / "mine.py").write_text(MINE)
    settings = [*TINY, "model._target_=mine.Stock", "max_steps=1"]

    def seen(*arguments):
        notes = exp.folder / "inputs.jsonl"
        notes.write_text("")
        done = exp(*settings, *arguments)
        assert done.returncode == 0, done.stderr
        return {tuple(json.loads(line)) for line in notes.read_text().splitlines()}

    both = {("loss", 101.0, 101.0), ("predict", 100.0, 100.0)}
    assert seen("output_dir=none") == both
    assert seen("output_dir=two", "nproc=2") == both
    assert seen("task=eval", "init_from=none", "plugins=[mine]", "output_dir=eval") == {("predict", 100.0, 100.0)}


class Pixels(BaseModel):
    """As from an image library on MMEngine: ``inputs`` and ``data_samples``."""

    def __init__(self):
        super().__init__(ImgDataPreprocessor(mean=[1.0], std=[2.0], pad_size_divisor=4, bgr_to_rgb=True))
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, inputs, data_samples=None, mode="tensor"):
        return inputs * self.scale


def test_mmengines_image_preprocessor():
    model, images = Pixels(), torch.rand(2, 3, 6, 8) * 255
    expected = torch.nn.functional.pad((images.flip(1) - 1) / 2, (0, 0, 0, 2))
    for stage in ("val", "test"):
        assert torch.equal(predictions(model, {"inputs": images}, stage), expected)
    assert torch.equal(forward(model, preprocessed(model, {"inputs": images}), "tensor"), expected)
