"""Ranks end at the same point soon after a notice to one of them, however the duration of steps changes."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from exp.engine.preemption import PreemptionHook
from exp.errors import Preempted

QUICK, BATCHES = 2000, 60


class Rank(threading.Thread):
    """One of three ranks, in a thread: trains in step with the others, and validates each at its own speed."""

    def __init__(self, number, together, store, sums, notice, steps, slow_s, batch_s) -> None:
        super().__init__(daemon=True)
        self.number, self.together, self.sums, self.notice = number, together, sums, notice
        self.steps, self.slow_s, self.batch_s = steps, slow_s, batch_s
        self.saved, self.batches, told = None, 0, threading.Event()
        ranks = SimpleNamespace(rank=number, world_size=3, is_main=number == 0, barrier=together.wait, sum=self.sum)
        info = SimpleNamespace(preempted=told.is_set, store=None)
        self.told, self.hook = told, PreemptionHook(info, ranks, store, SimpleNamespace(save=self.save))

    def save(self, _, step, validation_due, wait) -> None:
        self.saved = step, validation_due, self.batches

    def sum(self, value):
        self.sums[self.number] = value
        self.together.wait()
        total = sum(self.sums.values())
        self.together.wait()
        return total

    def run(self) -> None:
        sampler = SimpleNamespace(common_batches=BATCHES)
        runner = SimpleNamespace(
            iter=0, user_hooks_overriding=lambda *_: [], train_loop=SimpleNamespace(validates_after=lambda *_: False),
            val_loop=SimpleNamespace(dataloader=SimpleNamespace(sampler=sampler)),
        )  # fmt: skip
        try:
            self.hook.before_train(runner)
            for step in range(self.steps):
                self.together.wait()  # the exchange of gradients
                time.sleep(self.slow_s * (step > QUICK))
                if (self.number, step) == (1, self.notice):
                    self.told.set()
                runner.iter = step
                self.hook.after_train_iter(runner, step)
            self.hook.before_validation(runner)
            for batch in range(BATCHES):
                time.sleep(self.batch_s * (1 + self.number))
                self.hook.before_val_iter(runner, batch)
                self.batches += 1
            self.hook.after_train(runner)
        except Preempted:
            pass


def saved(steps: int, notice: int, slow_s: float = 0.0, batch_s: float = 0.0) -> list[tuple]:
    """Step, whether the validation is due, and batches of it so far, by rank."""
    together, store, sums = threading.Barrier(3, timeout=100), dist.HashStore(), {}
    ranks = [Rank(number, together, store, sums, notice, steps, slow_s, batch_s) for number in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
        assert not rank.is_alive()
    return [rank.saved for rank in ranks]


def test_after_quick_steps_a_slow_one_is_not_waited_for_two_thousand_times():
    """Counted in steps, the time to the next look would have grown with them: from 1 s to minutes."""
    one, *others = saved(QUICK + 30, notice=QUICK + 1, slow_s=0.5)
    assert others == [one] * 2
    assert (one[1], QUICK + 1 < one[0] < QUICK + 30) == (False, True)


def test_ranks_that_are_not_in_step_end_before_the_same_batch_of_a_validation():
    one, *others = saved(steps=1, notice=0, batch_s=0.05)
    assert others == [one] * 2
    assert (one[:2], 0 < one[2] < BATCHES) == ((0, True), True)


@pytest.mark.parametrize("notice", [None, 30])
def test_a_training_that_is_over_first_is_complete_on_all_ranks_or_none(notice):
    assert len({*saved(steps=31, notice=notice, batch_s=0.001)}) == 1
