"""Who gets which devices."""

from __future__ import annotations

import os

from exp.hardware.registry import create_backend
from exp.sweep.packing import _Pools


def backend_of(name: str, **settings):
    return create_backend({"_target_": name, "name": name, **settings})


def test_eight_cards_have_room_for_four_jobs_of_two():
    cards = backend_of("gcu", simulate=True)
    pools = _Pools(parallel_jobs=8)
    taken = [pools.take(cards, 2) for _ in range(5)]
    assert [devices and devices["gcu"] for devices in taken] == [[0, 1], [2, 3], [4, 5], [6, 7], None]
    pools.give_back(taken[1])
    assert pools.take(cards, 2)["gcu"] == [2, 3]


def test_jobs_on_the_processor_share_its_cores():
    cores = len(os.sched_getaffinity(0))
    cpu = backend_of("cpu")
    pools = _Pools(parallel_jobs=None)
    assert all(pools.take(cpu, 1) for _ in range(cores))
    assert pools.take(cpu, 1) is None
    assert _Pools(parallel_jobs=None).take(cpu, cores + 7)["cores"] == list(range(cores))
