"""``data.inputs``, ``data.targets``, ``data.covariates`` and ``data.missing``: what a batch has, and what is scored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exp.engine.distributed import Distributed
from exp.errors import DataError
from exp.forecasting.config import ForecastingDataConfig
from exp.forecasting.data.dataset import ForecastingData
from exp.forecasting.data.preflight import preflight

ROWS, LOOKBACK, HORIZON = 200, 24, 8
NAMES = ["pump", "temp", "flow"]


@pytest.fixture
def path(tmp_path):
    """Three series; some cells of each are empty."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(ROWS, 3)).round(3)
    cells = [[repr(float(value)) for value in row] for row in values]
    for row, column, empty in ((0, 0, ""), (30, 0, "NaN"), (31, 0, ""), (170, 0, ""), (171, 1, "nan"), (175, 2, "NA")):
        cells[row][column] = empty
    dates = [f"2020-01-{1 + row // 24:02d} {row % 24:02d}:00:00" for row in range(ROWS)]
    lines = [",".join([date, *row]) for date, row in zip(dates, cells)]
    path = tmp_path / "plant.csv"
    path.write_text("\n".join(["date," + ",".join(NAMES), *lines]) + "\n")
    return path


def made(path, **keys):
    keys = {"channels": 3, "missing": "mask", **keys}
    return ForecastingData("plant", str(path), lookback=LOOKBACK, horizon=HORIZON, **keys)


def table(path):
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    return np.array([[float(cell) if cell and cell != "NA" else np.nan for cell in row[1:]] for row in rows])


def test_empty_cells_are_filled_where_they_are_seen_and_nan_where_they_are_truth(path):
    data, values = made(path), table(path)
    mean, std = np.nanmean(values[:140], axis=0), np.nanstd(values[:140], axis=0)
    np.testing.assert_allclose(data.mean, mean)
    np.testing.assert_allclose(data.std, std)
    x = data.train[[0]]["x"][0]
    assert x[0, 0] == 0.0  # nothing before it: the mean
    seen = data.train[[20]]["x"][0, :, 0]  # rows 20 to 43
    assert seen[10] == seen[11] == seen[9]
    batch = data.test[torch.arange(len(data.test))]
    truth = np.stack([values[160 + n : 168 + n] for n in range(len(data.test))])
    np.testing.assert_array_equal(batch["known"].numpy(), ~np.isnan(truth))
    np.testing.assert_allclose(data.to_original_units(batch["y"].double()), truth, atol=1e-6)
    assert data.record(lambda each: [each])["cells_without_truth"] == 6
    there = made(path, targets=["flow"], covariates=["temp"], on_device=True).test
    cut = there.on_device(torch.device("cpu"), None)(torch.tensor([5, 0, 17]))
    torch.testing.assert_close(cut, there[[5, 0, 17]], rtol=0, atol=0, equal_nan=True)


def test_metrics_are_over_the_cells_with_a_truth(path):
    """In parts of other sizes, as ranks have them."""
    data, values = made(path, targets=["flow", "pump"]), table(path)
    assert data.target_names == ["pump", "flow"]
    count = len(data.test)
    metrics, outputs = data.metrics(detailed=True), torch.randn(count, HORIZON, 3)
    for part in torch.arange(count).chunk(3):
        metrics.update(outputs[part], data.test[part])
    found = metrics.compute(Distributed())
    truth = np.stack([values[160 + n : 168 + n] for n in range(count)])
    error = (outputs.numpy() - (truth - data.mean.numpy()) / data.std.numpy())[..., [0, 2]]
    units = error * data.std.numpy()[[0, 2]]
    expected = {"mse": np.nanmean(error**2), "mae": np.nanmean(abs(error)), "mse_file_units": np.nanmean(units**2)}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    per_channel, per_step = metrics.tables()
    assert per_channel.rows == ["pump", "flow"]
    assert per_channel.columns["mae"] == pytest.approx(np.nanmean(abs(error), axis=(0, 1)), rel=1e-5)
    assert per_step.columns["mse_file_units"] == pytest.approx(np.nanmean(units**2, axis=(0, 2)), rel=1e-5)


def test_covariates_come_ahead_and_beyond_the_last_target(path):
    lines = path.read_text().splitlines()
    # The plan of the pump goes on for five rows more; nobody knows the rest yet.
    lines += [f"2020-01-09 {8 + row:02d}:00:00,{row + 0.5},," for row in range(5)]
    path.write_text("\n".join(lines))
    data = made(path, covariates=["pump"])
    assert data.target_names == ["temp", "flow"]
    batch = data.test[[3]]
    assert batch["future"].shape == (1, HORIZON, 1 + 4)
    begin = data.rows["test"].start + 3 + LOOKBACK
    pump = table(path)[begin : begin + HORIZON, 0]
    later = batch["future"][0, :, 0].double() * data.std[0] + data.mean[0]
    np.testing.assert_allclose(later[~np.isnan(pump)], pump[~np.isnan(pump)], atol=1e-6)
    assert batch["known"][0, :, 0].sum() == 0
    window, dates = data.future_window()
    assert [str(dates[place]) for place in (0, -1)] == ["2020-01-09 08:00:00", "2020-01-09 15:00:00"]
    ahead = window["future"][0, :, 0].double() * data.std[0] + data.mean[0]
    np.testing.assert_allclose(ahead, [0.5, 1.5, 2.5, 3.5, 4.5, 4.5, 4.5, 4.5], atol=1e-6)
    np.testing.assert_allclose(window["future"][0, :, 1], np.arange(8, 16) / 23 - 0.5, atol=1e-6)
    assert made(path, covariates=[]).test[[0]]["future"].shape[-1] == 4


def test_one_series_alone(path):
    """TSLib's mode S; by number where there are no names."""
    data = made(path, inputs=["flow"], targets=["flow"], channels=1)
    assert data.names == ["flow"]
    np.testing.assert_allclose(data.mean, np.nanmean(table(path)[:140, 2]))
    bare = path.parent / "bare.csv"
    bare.write_text("\n".join(line.partition(",")[2] for line in path.read_text().splitlines()[1:]))
    other = made(bare, inputs=[2], channels=1, header=False)
    assert torch.equal(other.test[[0]]["x"], data.test[[0]]["x"])


def test_roles_that_cannot_be_are_refused_before_anything_starts(path):
    for keys, named in (
        ({"missing": "drop"}, "data.missing=drop"),
        ({"targets": ["flw"]}, "'flow'"),
        ({"targets": ["pump"], "covariates": ["pump"]}, "'pump'.*data.covariates"),
        ({"covariates": NAMES}, "data.covariates"),
        ({"targets": ["flow", "flow"]}, "data.targets"),
        ({"targets": []}, r"data.targets=\[\]"),
        ({"inputs": ["flow"]}, "data.channels=1"),
        ({"inputs": ["flow"], "channels": 1, "targets": ["temp"]}, "'temp'"),
    ):
        config = {"name": "plant", "file": str(path), "channels": 3, "missing": "mask", **keys}
        with pytest.raises(DataError, match=named):
            preflight(vars(ForecastingDataConfig(**config)))
        with pytest.raises(DataError, match=named):
            made(path, **keys)
    with pytest.raises(DataError, match="row 2, column pump"):
        made(path, missing="refuse")
    path.write_text("date,a,b\n" + "".join(f"2020-01-01 {n // 60:02d}:{n % 60:02d},{n},\n" for n in range(200)))
    with pytest.raises(DataError, match=r"plant.csv, column b"):
        made(path, channels=2)


def test_rows_that_are_known_ahead_are_in_no_part(path):
    before = made(path, covariates=["temp"])
    with path.open("a") as file:
        file.writelines(f"2020-02-{1 + row // 24:02d} {row % 24:02d}:00:00,,0.5,\n" for row in range(60))
    after = made(path, covariates=["temp"])
    assert after.rows == before.rows
    assert after.num_past == 200
    assert torch.equal(after.mean, before.mean)
    new = made(path, covariates=["temp"], split="new")
    new.adopt(before.state())
    assert new.rows == {"test": range(260)}


def test_a_part_without_any_truth_is_refused_and_a_series_without_is_told(path):
    lines = path.read_text().splitlines()
    lines[141:161] = [line.rpartition(",")[0] + "," for line in lines[141:161]]  # all of validation's rows
    path.write_text("\n".join(lines) + "\n")
    data = made(path)
    assert ["val part" in note for note in data.notes if "flow" in note] == [True]
    data.check_truth(["train", "val", "test"])
    data = made(path, targets=["flow"])
    data.check_truth(["train", "test"])
    with pytest.raises(DataError, match=r"flow .*val.*141 to 160"):
        data.check_truth(["train", "val", "test"])
