"""A model of MMEngine's own kind, with a data preprocessor: the same inputs wherever it is called."""

from __future__ import annotations

import json

import pytest

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


# As in mmsegmentation: samples have `inputs` and `data_samples`, a preprocessor stacks them, samples are predicted.
SEGMENTOR = """
import torch
from mmengine.dataset import pseudo_collate
from mmengine.model import BaseModel, ImgDataPreprocessor
from mmengine.structures import BaseDataElement, PixelData
from torch import nn

from exp.data.base import Data
from exp.metrics import SampleMetric


class Tiles(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        image = torch.full((3, 8, 8), number * 10, dtype=torch.uint8)
        truth = PixelData(data=torch.full((1, 8, 8), number % 2, dtype=torch.int64))
        return {"inputs": image, "data_samples": BaseDataElement(gt_sem_seg=truth)}


class Fields(Data):
    collate = staticmethod(pseudo_collate)
    eval_batch_size = 4

    def __init__(self, name):
        self.train = self.val = self.test = Tiles()

    def model_arguments(self):
        return {"num_classes": 2, "in_channels": 3}

    def metrics(self, detailed=False):
        return Share()


class Share(SampleMetric):
    names = ("share",)
    greater_is_better = True

    def per_sample(self, outputs, batch):
        return torch.stack([
            (sample.pred_sem_seg.data == sample.gt_sem_seg.data.to(sample.pred_sem_seg.data.device)).float().mean()
            for sample in outputs
        ])


class Segmentor(BaseModel):
    def __init__(self, in_channels, hidden=4):
        super().__init__(ImgDataPreprocessor(mean=[123.0] * 3, std=[58.0] * 3))
        self.layers = nn.Sequential(nn.Conv2d(in_channels, hidden, 1), nn.ReLU(), nn.Conv2d(hidden, 2, 1))

    def forward(self, inputs, data_samples=None, mode="tensor"):
        logits = self.layers(inputs)
        if mode == "tensor":
            return logits
        if mode == "loss":
            truth = torch.cat([sample.gt_sem_seg.data for sample in data_samples])
            loss = nn.functional.cross_entropy(logits, truth)
            return {"decode.loss_ce": loss, "decode.acc_seg": (logits.argmax(1) == truth).float().mean() * 100}
        for sample, each in zip(data_samples, logits.argmax(1, keepdim=True)):
            sample.pred_sem_seg = PixelData(data=each)
        return data_samples
"""


@pytest.mark.extended
def test_a_model_in_the_manner_of_mmsegmentation_needs_no_bridge(exp):
    (exp.folder / "mine.py").write_text(SEGMENTOR)
    own = ["experiment=plain", "model=custom", "model._target_=mine.Segmentor", "+model.hidden=8", "plugins=[mine]",
           "data=custom", "data._target_=mine.Fields", "backend=cpu", "global_batch_size=4", "log_every=1",
           "max_steps=4", "plots=false"]  # fmt: skip
    commands = [
        [*own, "output_dir=run"],
        [*own, "output_dir=two", "nproc=2"],
        ["task=eval", "plugins=[mine]", "init_from=run", "output_dir=tested"],
        ["task=predict", "plugins=[mine]", "init_from=run", "output_dir=said"],
        [*own, "task=estimate", "output_dir=estimate"],
    ]
    for words in commands:
        done = exp(*words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    assert exp.losses("two") == pytest.approx(exp.losses("run"), rel=1e-5)
    assert exp.result("tested")["metrics"] == exp.result("run")["metrics"]
    assert exp.result("estimate")["estimate"]["parameters"] == 3 * 8 + 8 + 8 * 2 + 2
