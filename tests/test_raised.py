"""An error of the user's code is one line that says whose it is and where, also when it comes late in a run."""

from __future__ import annotations

import ctypes
import pickle
import re
import urllib.error
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mmengine.hooks import Hook
from torch import nn

from exp.data.base import Data, split_of
from exp.data.loader import EvalBatchSampler, make_loader
from exp.errors import (
    ConfigError,
    Preempted,
    RunError,
    SampleError,
    UnavailableError,
    as_exp_error,
    error_message,
    first_line,
    format_user_error,
    is_out_of_memory,
)
from exp.metrics import SampleMetric
from exp.runs.failures import is_caused_by_peer

HERE = r"\(test_raised.py, line \d+\)"


class Far(SampleMetric):
    names = ("far",)
    greater_is_better = False

    def per_sample(self, outputs, batch):
        return batch["z"]


class Loud(Hook):
    def after_train_iter(self, runner, **_):
        raise RuntimeError("boom\nwith more to it")


class Samples(torch.utils.data.Dataset):
    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return 12

    def __getitem__(self, number):  # or the numbers of a batch
        at_fault = 9 in torch.as_tensor(number).flatten().tolist()
        if at_fault and self.fault == "raises":
            raise ValueError("bad sample")
        columns = 2 if at_fault and self.fault == "short" else 4
        return {"x": torch.zeros(3, columns), **({"note": None} if self.fault == "none" else {})}


class Photos(Data):
    def __init__(self, test):
        self.test = test

    def metrics(self, detailed=False):
        return Far()


def raising(error):
    raise error


def caught(call, *arguments) -> Exception:
    with pytest.raises(Exception) as info:
        call(*arguments)
    error = info.value
    error.__traceback__ = error.__traceback__.tb_next  # that of the call, as it would be caught in a run
    return error


@pytest.mark.parametrize(
    ("call", "arguments", "said"),
    [
        (Far().update, [None, {}], rf"metric: {__name__}\.Far\.per_sample raises KeyError: 'z' {HERE}"),
        (Loud().after_train_iter, [None],
         rf"hook: {__name__}\.Loud\.after_train_iter raises RuntimeError: boom {HERE}\nwith more to it"),
        (raising, [KeyError("quux")], rf"{__name__}\.raising raises KeyError: 'quux' {HERE}"),
    ],
)  # fmt: skip
def test_the_line_has_the_member_and_the_innermost_place(call, arguments, said):
    assert re.fullmatch(said, format_user_error(caught(call, *arguments)))


@pytest.mark.parametrize(
    ("call", "arguments"),
    [(nn.Linear(2, 2), [torch.ones(3)]), (EvalBatchSampler, ["many", 2]), (int, ["x"]), (raising, [RunError("ours")])],
)
def test_what_is_torchs_or_pythons_or_ours_is_told_as_it_is(call, arguments):
    assert format_user_error(caught(call, *arguments)) is None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_late_sample_is_named_with_split_number_and_place(workers):
    for fault, said in (
        ("raises", rf"data: {__name__}\.Photos\.test\[9\] raises ValueError: bad sample {HERE}"),
        ("short", r".+\.test\[8, 9, 10, 11\] raises RuntimeError: .+; x is \(3, 2\) or \(3, 4\)"),
        ("none", r".+\.test\[0, 1, 2, 3\] raises TypeError: .+; note is NoneType"),
    ):
        dataset = split_of(Photos(Samples(fault)), "test", 0)
        with pytest.raises(SampleError) as info:
            list(make_loader(dataset, EvalBatchSampler(12, 4), workers))
        assert re.fullmatch(said, error_message(info.value)), error_message(info.value)


@pytest.mark.parametrize("error", [
    ConnectionResetError(104, "Connection reset by peer"),
    urllib.error.URLError(ConnectionRefusedError(111, "Connection refused")),
    BrokenPipeError(32, "Broken pipe"),
    RuntimeError("Connection closed by peer"),
    TimeoutError("timed out waiting for the server"),
])  # fmt: skip
def test_a_lost_connection_of_user_code_is_no_lost_rank(error):
    assert not is_caused_by_peer(caught(raising, error), world_size=2)


def test_a_rank_that_does_not_come_is_a_lost_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    short = {"store": store, "rank": 0, "world_size": 2, "timeout": timedelta(seconds=0.5)}
    error = caught(lambda: dist.init_process_group("gloo", **short))
    assert is_caused_by_peer(error, world_size=2)
    assert not is_caused_by_peer(error, world_size=1)


class OutOfMemoryError(RuntimeError):
    """As torch's, since 1.13."""


@pytest.mark.parametrize(("error", "wanted"), [
    (OutOfMemoryError("no memory left"), True),
    (RuntimeError("GCU out of memory. Tried to allocate 20.00 MiB. GCU 0 has a total capacity of 16 GiB"), True),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
    (RuntimeError("out of memory bank"), False),
    (RuntimeError("the queue ran out of memory: tried again"), False),
    (ValueError("GCU out of memory. Tried to allocate 20.00 MiB"), False),
    (RunError("GCU out of memory. Tried to allocate 20.00 MiB"), False),
])  # fmt: skip
def test_a_device_is_out_of_memory_by_type_or_by_the_allocators_message(error, wanted):
    assert is_out_of_memory(error) is wanted


def test_a_library_that_does_not_load_is_told_from_a_word(tmp_path):
    (tmp_path / "none.so").touch()
    assert isinstance(as_exp_error(caught(ctypes.CDLL, str(tmp_path / "none.so"))), UnavailableError)
    assert as_exp_error(caught(raising, OSError("weights.so is missing"))) is None
    assert as_exp_error(caught(raising, ImportError("weights.so is missing"))) is None


def test_an_error_carries_its_parts_and_formats_them_once():
    error = ConfigError("data.file=x is missing", "set data.root", ["in /d: a"], key="data.file", file="/d/x")
    assert str(error) == "data.file=x is missing; set data.root\n  in /d: a"
    passed_on = pickle.loads(pickle.dumps(error))
    assert (str(passed_on), passed_on.headline, passed_on.key) == (str(error), first_line(error), "data.file")
    assert pickle.loads(pickle.dumps(Preempted(3))).step == 3
