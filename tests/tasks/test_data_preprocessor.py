"""A model of MMEngine's own kind, with a data preprocessor: the same inputs wherever it is called."""

from __future__ import annotations

import json

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
