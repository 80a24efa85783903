from __future__ import annotations

import pytest

from exp.report.curves import Curve, history_of, thinned
from exp.report.runs import find_runs
from exp.report.scale import is_logarithmic


def test_which_numbers_are_logarithmic():
    for numbers in ([1e-4, 1e-3, 1e-2], [1e-4, 3e-4, 1e-3, 3e-3], [64, 128, 256], [1e-4, 1e-2]):
        assert is_logarithmic(numbers), numbers
    for numbers in ([1, 2, 3], [96, 192, 336, 720], [0.0, 0.1, 10], [-1, 1], [5], []):
        assert not is_logarithmic(numbers), numbers


def test_curves_of_losses_in_parts_and_of_broken_values(make_run):
    records = [
        {"split": "train", "step": 1, "loss_a": 1.0, "loss_b": 2.0, "lr": 0.1},
        {"split": "train", "step": 2, "loss": float("nan")},
        {"split": "train", "step": 3, "loss": "much", "lr": True},
        {"split": "train", "step": 4, "loss": 0.5, "grad_norm": 3},
        {"split": "val", "step": 4, "mse": 0.7, "units": {"mse": "m"}}, {"split": "test", "step": 4, "mse": 9.0},
    ]  # fmt: skip
    history = history_of(find_runs([make_run("run", metric=1.0, records=records)])[0])
    assert history.curves == {
        ("train", "loss"): Curve([1, 4], [3.0, 0.5]), ("train", "loss_a"): Curve([1], [1.0]),
        ("train", "loss_b"): Curve([1], [2.0]), ("train", "lr"): Curve([1], [0.1]),
        ("train", "grad_norm"): Curve([4], [3]), ("val", "mse"): Curve([4], [0.7]),
    }  # fmt: skip
    assert (history.epochs, history.seconds) == (None, None), "what cannot be told"


@pytest.mark.parametrize(
    ("validations", "epochs"),
    [
        ([(10, 1)], Curve([0, 10, 16], [0, 1, 1.6])),  # the second epoch has not ended
        ([(10, 1), (16, 2)], Curve([0, 10, 16], [0, 1, 2])),  # it has, and was a shorter one
        ([(10, 1), (16, 1)], Curve([0, 10, 16], [0, 1, 1.6])),  # a validation within it
    ],
)
def test_epochs_and_seconds_over_the_steps(make_run, validations, epochs):
    records = [{"split": "train", "step": step, "epoch": step // 11, "loss": 1, "samples_per_second": rate}
               for step, rate in ((4, 64), (10, 32), (16, 64))]  # fmt: skip
    records += [{"split": "val", "step": step, "epoch": epoch, "mse": 1} for step, epoch in validations]
    history = history_of(find_runs([make_run("run", metric=1.0, records=records)])[0])
    assert (history.epochs, history.seconds) == (epochs, Curve([0, 4, 10, 16], [0, 2, 8, 11]))


@pytest.mark.parametrize("count", [1, 400, 401, 12345])
def test_thinning_keeps_the_ends_and_every_spike(count):
    values = [0.0] * count
    values[count // 3] = 9.0
    thin = thinned(Curve(list(range(count)), values), 400)
    assert len(thin.steps) <= 400
    assert thin.steps == sorted(set(thin.steps))
    assert (thin.steps[0], thin.steps[-1], max(thin.values)) == (0, count - 1, 9.0)
