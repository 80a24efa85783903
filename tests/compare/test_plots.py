from __future__ import annotations

import io
import warnings

import numpy as np
import pytest
from PIL import Image

from exp.compare.curves import Curve, curves_of, thinned
from exp.compare.plots import comparison_pictures
from exp.compare.runs import find_runs
from exp.compare.scale import Scale, is_logarithmic

pytestmark = pytest.mark.slow  # nothing here depends on the version of torch


def pixels(content):
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)


def drawn(runs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pictures = comparison_pictures(runs)
    return {name: pixels(content) for each in pictures.values() for name, content in each.items()}


@pytest.mark.parametrize(
    ("numbers", "log"),
    [
        ([1e-4, 1e-3, 1e-2], True), ([1e-4, 3e-4, 1e-3, 3e-3], True), ([64, 128, 256], True), ([1e-4, 1e-2], True),
        ([1, 2, 3], False), ([96, 192, 336, 720], False), ([0.0, 0.1, 10], False), ([-1, 1], False), ([5], False),
        ([], False),
    ],
)  # fmt: skip
def test_which_numbers_are_logarithmic(numbers, log):
    assert is_logarithmic(numbers) is log


def test_scales_of_numbers_and_of_anything_else():
    rates = Scale([1e-3, 1e-5, 1e-3, 1e-4])
    assert rates.log
    assert [rates.share(rate) for rate in (1e-5, 1e-4, 1e-3)] == pytest.approx([0, 0.5, 1])
    mixed = Scale(["b", 10, None, 2, "b"])
    assert mixed.categories == ["2", "10", "b", "null"]
    assert mixed.share("b") == pytest.approx(2 / 3)
    assert Scale([True, False]).categories == ["false", "true"]
    assert Scale([3, 1], categorical=True).categories == ["1", "3"]


def test_a_sweep_over_two_keys(make_sweep):
    (pictures,) = comparison_pictures(find_runs([make_sweep()])).values()
    # No map: seeds are averaged over, and then there is one key.
    assert list(pictures) == ["mse_parallel.png", "mse_over_lr.png", "mse_over_seed.png", "mse_curves.png"]
    for name, content in pictures.items():
        picture = pixels(content)
        assert (picture < 250).any(axis=-1).sum() > 1000, name
        assert picture.shape[1] < 1000


def test_failed_runs_are_in_every_plot(make_sweep):
    some = drawn(find_runs([make_sweep("some", seeds=(1, 2, 3), failed=(1, 6))]))
    # The same runs, but two of them were never begun.
    folder = make_sweep("none", seeds=(1, 2, 3), failed=(1, 6))
    runs = [run for run in find_runs([folder]) if run.metric is not None]
    without = drawn(runs)
    assert some.keys() == without.keys()
    for name in some:
        assert some[name].shape != without[name].shape or (some[name] != without[name]).any(), name


@pytest.mark.parametrize(("greater", "best"), [(False, 0), (True, 2)])
def test_the_best_cell_of_a_map_is_the_darkest(make_run, tmp_path, greater, best):
    for number, (one, other) in enumerate((one, other) for other in "xy" for one in "abc"):
        overrides = [f"model.one={one}", f"model.other={other}"]
        make_run(str(number), metric=float(number % 3), overrides=overrides, greater_is_better=greater,
                 config={"model.one": one, "model.other": other})  # fmt: skip
    picture = drawn(find_runs([tmp_path]))["mse_map.png"]
    row = picture[int(picture.shape[0] * 0.25), : int(picture.shape[1] * 0.8)]
    coloured = row[(row.max(axis=-1) - row.min(axis=-1)) > 30]
    changes = np.abs(np.diff(coloured, axis=0)).sum(axis=-1) > 60
    cells = [part.mean() for part in np.split(coloured, np.flatnonzero(changes) + 1) if len(part) > 20]
    assert int(np.argmin(cells)) == best


def test_seeds_are_averaged_over_in_the_map(make_run, tmp_path):
    for number in range(12):
        rate, size, seed = [1e-3, 1e-2][number % 2], [16, 32][number // 2 % 2], number // 4
        config = {"optim.lr": rate, "model.d_model": size, "seed": seed}
        make_run(str(number), metric=1.0 + seed, overrides=[f"{key}=x" for key in config], config=config)
    names = drawn(find_runs([tmp_path])).keys()
    assert "mse_map.png" in names
    assert "mse_over_seed.png" in names


def test_a_random_search_over_keys_of_all_kinds(make_run, tmp_path):
    generator = np.random.default_rng(0)
    for number in range(40):
        config = {"optim.lr": float(10 ** generator.uniform(-5, -1)), "model.dropout": float(generator.uniform()),
                  "optim.type": ["Adam", "SGD", None][number % 3], "model.blocks": [1, number % 2],
                  "model.path": f"{'/very/long' * 9}/{number}"}  # fmt: skip
        score = float(generator.uniform(1, 2)) * (10_000 if number == 5 else 1)
        outcome = {"error": "x"} if number % 7 == 6 else {"metric": score}
        make_run(str(number), overrides=[f"{key}=x" for key in config], config=config, **outcome)
    names = drawn(find_runs([tmp_path])).keys()
    assert names == {
        "mse_parallel.png",
        *(f"mse_over_{key}.png" for key in ("lr", "dropout", "type", "blocks", "path")),
    }


def test_one_run_two_runs_and_failed_ones(make_sweep, make_run, tmp_path):
    folder = make_sweep()
    assert drawn(find_runs([folder / "0"])).keys() == {"mse_curves.png"}
    two = drawn(find_runs([folder / "0", folder / "2"]))
    assert two.keys() == {"mse_over_lr.png", "mse_curves.png"}
    one_and_failed = drawn(find_runs([folder / "0", folder / "5"]))
    assert "mse_over_lr.png" in one_and_failed
    assert drawn(find_runs([folder / "5"])).keys() == {"loss_curves.png"}
    make_run("empty", error="no data")
    assert drawn(find_runs([tmp_path / "empty"])) == {}


def test_names_that_matplotlib_would_take_for_something_else(make_run, tmp_path):
    records = [{"split": "val", "step": step, "mse": 1 / step} for step in (1, 2)]
    for number, name in enumerate(["$x_", "_hidden", "a$b$c{", "模型"]):
        config = {"model.$key$": name, "model._other": number}
        make_run(name, metric=1.0 + number, overrides=[f"{key}=x" for key in config], config=config, records=records)
    assert len(drawn(find_runs([tmp_path]))) == 4


def test_of_many_curves_the_best_are_strong(make_run, tmp_path):
    for number in range(12):
        records = [{"split": "val", "step": step, "mse": 1 / step + number} for step in range(1, 30)]
        make_run(
            str(number), metric=float(number), overrides=[f"seed={number}"], config={"seed": number}, records=records
        )
    picture = drawn(find_runs([tmp_path]))["mse_curves.png"]
    grey = np.abs(picture - 170).max(axis=-1) < 25
    blue = np.abs(picture - (31, 119, 180)).max(axis=-1) < 10
    assert grey.sum() > 500
    assert blue.sum() > 300


def test_curves_of_losses_in_parts_and_of_broken_values(make_run):
    records = [
        {"split": "train", "step": 1, "loss_a": 1.0, "loss_b": 2.0, "lr": 0.1},
        {"split": "train", "step": 2, "loss": float("nan")},
        {"split": "train", "step": 3, "loss": "much"}, {"split": "train", "step": 4, "loss": 0.5},
        {"split": "val", "step": 4, "mse": 0.7, "mae": 1}, {"split": "test", "step": 4, "mse": 9.0},
    ]  # fmt: skip
    run = find_runs([make_run("run", metric=1.0, records=records)])[0]
    assert curves_of(run, "mse") == {"loss": Curve([1, 4], [3.0, 0.5]), "val": Curve([4], [0.7])}
    assert curves_of(run, None) == {"loss": Curve([1, 4], [3.0, 0.5])}


@pytest.mark.parametrize("count", [1, 400, 401, 12345])
def test_thinning_keeps_the_ends_and_every_spike(count):
    values = [0.0] * count
    values[count // 3] = 9.0
    thin = thinned(Curve(list(range(count)), values), 400)
    assert len(thin.steps) <= 400
    assert thin.steps == sorted(set(thin.steps))
    assert (thin.steps[0], thin.steps[-1], max(thin.values)) == (0, count - 1, 9.0)
