"""Who gets which devices."""

from __future__ import annotations

import os

import pytest

from exp.backends_registry import create_backend
from exp.sweep.packing import _Pools


@pytest.fixture
def cards(monkeypatch):
    monkeypatch.delenv("TOPS_VISIBLE_DEVICES", raising=False)
    return create_backend({"_target_": "gcu", "name": "gcu", "simulate": True})


def test_eight_cards_have_room_for_four_jobs_of_two(cards):
    pools = _Pools(parallel_jobs=8)
    taken = [pools.take(cards, 2) for _ in range(4)]
    assert [devices["gcu"] for devices in taken] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert pools.take(cards, 2) is None
    pools.give_back(taken[1])
    assert pools.take(cards, 2)["gcu"] == [2, 3]


def test_jobs_on_the_processor_share_its_cores():
    cores = len(os.sched_getaffinity(0))
    cpu = create_backend({"_target_": "cpu", "name": "cpu"})
    pools = _Pools(parallel_jobs=None)
    assert all(pools.take(cpu, 1) for _ in range(cores))
    assert pools.take(cpu, 1) is None
    assert _Pools(parallel_jobs=None).take(cpu, cores + 7)["cores"] == list(range(cores))


def test_a_job_sees_its_own_cards_among_those_that_are_visible(cards, monkeypatch):
    assert cards.only([2, 3], 2) == {"TOPS_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setenv("TOPS_VISIBLE_DEVICES", "4,5,6,7")
    assert cards.only([2, 3], 2) == {"TOPS_VISIBLE_DEVICES": "6,7"}


def test_the_variable_that_counts_is_the_one_that_is_set(monkeypatch):
    amd = create_backend({"_target_": "rocm", "name": "rocm"})
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert amd.only([1], 1) == {"HIP_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert amd.only([1], 1) == {"CUDA_VISIBLE_DEVICES": "5"}


def test_threads_follow_the_share_of_cores(monkeypatch):
    cpu = create_backend({"_target_": "cpu", "name": "cpu"})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cpu.only([0, 1, 2, 3], 2) == {"OMP_NUM_THREADS": "2"}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cpu.only([0, 1, 2, 3], 2) == {}
