"""An error of the user's code is one line that says whose it is and where, also when it comes late in a run."""

from __future__ import annotations

import dataclasses
import re
import traceback

import pytest
import torch
from mmengine.hooks import Hook
from torch import nn
from torch.utils.data import Dataset

from exp.data.base import Data, split_of
from exp.data.loader import eval_loader
from exp.data.sampler import EvalBatchSampler
from exp.errors import RunError, SampleError
from exp.launcher.rank import RankInfo
from exp.metrics import SampleMetric
from exp.raised import message_of, told
from exp.runfolder import RunFolder, read_json
from exp.worker import run_worker

HERE = r"\(test_raised.py, line \d+\)"


class Block(nn.Module):
    def forward(self, x):
        return x @ x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x)


class Far(SampleMetric):
    names = ("far",)
    greater_is_better = False

    def per_sample(self, outputs, batch):
        return batch["z"]


class Loud(Hook):
    def after_train_iter(self, runner, **_):
        raise RuntimeError("boom\nwith more to it")


class Samples(Dataset):
    def __init__(self, count=12, **faults):
        self.count, self.faults = count, faults

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if self.faults.get("raising") == number:
            raise ValueError(f"bad sample no. {number}")
        sample = {"x": torch.zeros(3, 2 if self.faults.get("short") == number else 4), "y": number}
        return {**sample, "note": None} if self.faults.get("none") else sample


class Whole(Samples):
    takes_batches = True

    def __getitem__(self, numbers):
        return super().__getitem__(int(numbers[0]))


class Photos(Data):
    def __init__(self, test):
        self.test = test

    def metrics(self, detailed=False):
        return Far()


def helper(folder=None, info=None):
    raise KeyError("quux")


def caught(call, *arguments) -> Exception:
    with pytest.raises(Exception) as info:
        call(*arguments)
    error = info.value
    error.__traceback__ = error.__traceback__.tb_next  # that of the call, as it would be caught in a run
    return error


def test_the_line_has_the_member_and_the_innermost_place():
    hook = Loud().after_train_iter
    for call, arguments, said in (
        (Net(), (torch.ones(2, 3),), rf"model: {__name__}\.Block\.forward raises RuntimeError: .+ {HERE}"),
        (Far().update, (None, {}), rf"metric: {__name__}\.Far\.per_sample raises KeyError: 'z' {HERE}"),
        (hook, (None,), rf"hooks: {__name__}\.Loud\.after_train_iter raises RuntimeError: boom {HERE}"),
        (helper, (), rf"{__name__}\.helper raises KeyError: 'quux' {HERE}"),
    ):  # fmt: skip
        head, *more = told(caught(call, *arguments)).splitlines()
        assert re.fullmatch(said, head), head
        assert "boom" not in head or more == ["with more to it"]


def test_what_is_not_the_users_code_is_told_as_it_is():
    for call, arguments in (
        (nn.Linear(2, 2), (torch.ones(3),)),  # torch's alone
        (EvalBatchSampler, ("many", 2)),  # exp's
        (int, ("x",)),
        (helper_of_ours, ()),
    ):
        assert told(caught(call, *arguments)) is None


def helper_of_ours():
    raise RunError("told in full")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_late_sample_is_named_with_split_number_and_place(workers):
    for faults, said in (
        ({"raising": 9}, rf"data: {__name__}\.Photos\.test\[9\] raises ValueError: bad sample no. 9 {HERE}"),
        ({"short": 9}, r".+\.test\[\.\.\.\] raises RuntimeError: .+; in sample 9, x is of shape \(3, 2\), and in .+"),
        ({"none": True}, r".+\.test\[\.\.\.\] raises TypeError: .+; in sample 0, note is None"),
    ):
        dataset = split_of(Photos(Samples(**faults)), "test", 0)
        with pytest.raises(SampleError) as info:
            list(eval_loader(dataset, EvalBatchSampler(12, 4), workers))
        assert re.fullmatch(said, message_of(info.value)), message_of(info.value)
    with pytest.raises(ValueError, match="bad sample") as info:
        list(eval_loader(Whole(raising=8), EvalBatchSampler(12, 4), workers))
    assert re.fullmatch(rf"data: \S+__getitem__ raises ValueError: bad sample no. 8 {HERE}", told(info.value))


def test_the_error_file_has_it_and_the_frames_let_go_of_the_model(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create()
    info = dataclasses.replace(RankInfo.single(), world_size=2)

    def body(folder, info):
        model = Net()
        model(torch.ones(2, 3))

    with pytest.raises(RuntimeError) as raised:
        run_worker(folder, info, redirect=False, body=body)
    said = read_json(folder.error_file(0))
    assert said["type"] == "RuntimeError"
    assert re.match(rf"model: {__name__}\.Block\.forward raises RuntimeError: ", said["message"])
    held = [frame.f_locals for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
    assert not any("model" in names for names in held)
