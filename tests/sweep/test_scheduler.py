"""Jobs side by side: who is asked for a device and when, and who hears a signal afterwards."""

from __future__ import annotations

import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
from exp.backends.cpu import CpuBackend

from exp.hardware.registry import create_backend
from exp.launcher.outcome import ProgressDisplay
from exp.launcher.slurm.follow import follow
from exp.runs.folder import RunFolder
from exp.runs.job import PREEMPT_SIGNAL, handle_signals
from exp.runs.lock import RunLock
from exp.sweep.scheduler import run_locally


class OneCard(CpuBackend):
    """Counts how often its card is looked for."""

    capabilities = replace(CpuBackend.capabilities, shared_device=False)
    visible_variables, looks = ("CARDS",), 0

    def device_count(self) -> int:
        OneCard.looks += 1
        return 1


def test_waiting_jobs_are_asked_for_only_when_one_has_ended(tmp_path, monkeypatch):
    """Not ten times a second, which for a thousand jobs took most of a core."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config, runs = SimpleNamespace(nproc=1), []
    backend = create_backend({"_target_": f"{__name__}.OneCard", "name": "one"})
    for number in range(40):
        runs.append(SimpleNamespace(config=config, backend=backend, folder=RunFolder(tmp_path / str(number))))
        runs[-1].folder.create()
        runs[-1].lock = RunLock(runs[-1].folder.path)
        runs[-1].lock.acquire()
    watcher, ended = ProgressDisplay(), []

    def stop(number, outcome):  # the jobs end at once, for lack of a configuration
        ended.append(number)
        if len(ended) == 2:
            signal.raise_signal(signal.SIGTERM)

    watcher.ended = stop
    outcomes, received = run_locally(runs, None, watcher)
    for run in runs:
        run.lock.release()
    assert (ended, received) == ([0, 1], signal.SIGTERM)
    assert sorted(outcomes) == ended
    assert OneCard.looks == 4  # for each that was started, and for the first of those that wait


@pytest.mark.parametrize(
    "work", [lambda: run_locally([], None, ProgressDisplay()), lambda: follow([], ProgressDisplay(), 0.0)]
)
def test_between_two_batches_of_a_sweep_a_notice_is_heard(work):
    came = []
    before = signal.getsignal(PREEMPT_SIGNAL)
    with handle_signals(lambda number, _: came.append(number), more_follows=True):
        work()
        signal.raise_signal(PREEMPT_SIGNAL)
        assert came == [PREEMPT_SIGNAL]
    assert signal.getsignal(PREEMPT_SIGNAL) is before
    with handle_signals(lambda number, _: came.append(number)):  # a run: only the report of its end is left
        pass
    signal.raise_signal(PREEMPT_SIGNAL)
    signal.signal(PREEMPT_SIGNAL, before)
    assert came == [PREEMPT_SIGNAL]
