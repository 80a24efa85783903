from __future__ import annotations

import csv
import dataclasses
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate

from exp.config.structures import register
from exp.errors import DataError
from exp.forecasting.config import ForecastingDataConfig
from exp.forecasting.data.dataset import ForecastingData
from exp.forecasting.data.preflight import locate

CONFIGS = {
    "etth1": ("ETTh1", "ETTh1.csv", 7, "ett_hour", True),
    "etth2": ("ETTh2", "ETTh2.csv", 7, "ett_hour", True),
    "ettm1": ("ETTm1", "ETTm1.csv", 7, "ett_minute", True),
    "ettm2": ("ETTm2", "ETTm2.csv", 7, "ett_minute", True),
    "weather": ("weather", "weather.csv", 21, "ratio", True),
    "solar": ("solar", "solar_AL.txt", 137, "ratio", False),
    "electricity": ("electricity", "electricity.csv", 321, "ratio", True),
    "traffic": ("traffic", "traffic.csv", 862, "ratio", True),
}


def composed(*overrides):
    register()
    with initialize_config_module("exp.conf", version_base="1.3"):
        return compose(overrides=list(overrides)).data


@pytest.fixture(scope="module")
def etth1():
    return ForecastingData("ETTh1", "ETTh1.csv", 7, split="ett_hour")


@pytest.fixture(scope="module")
def raw():
    """The bundled file, read by other means."""
    with locate(None, "ETTh1.csv", "ETTh1").open() as file:
        header, *rows = csv.reader(file)
    return header, [row[0] for row in rows], np.array([[float(cell) for cell in row[1:]] for row in rows])


@pytest.mark.parametrize("name", CONFIGS)
def test_config_files(name):
    config = composed(f"+data={name}")
    assert (config.name, config.file, config.channels, config.split, config.header) == CONFIGS[name]
    assert config.root is None


def test_any_other_csv(tmp_path):
    rows = [f"2020-01-01 {n // 60:02d}:{n % 60:02d},{n},{n % 7}" for n in range(200)]
    (tmp_path / "own.csv").write_text("\n".join(["date,up,week", *rows]))
    sizes = ["data.lookback=24", "data.horizon=8", "data.channels=2"]
    config = composed("+data=csv", "data.name=own", f"data.root={tmp_path}", "data.file=own.csv", *sizes)
    data = instantiate(config)
    assert data.names == ["up", "week"]
    assert len(data.train) == 140 - 32 + 1
    assert [str(date) for date in data.future_window()[1][:2]] == ["2020-01-01 03:20:00", "2020-01-01 03:21:00"]


def test_takes_exactly_the_fields_of_the_schema():
    fields = {field.name: field.default for field in dataclasses.fields(ForecastingDataConfig) if field.name[0] != "_"}
    parameters = inspect.signature(ForecastingData).parameters
    assert set(parameters) == set(fields)
    for name, parameter in parameters.items():
        if parameter.default is not parameter.empty:
            assert parameter.default == fields[name]


def test_number_of_windows_is_that_of_the_authors_logs(etth1):
    assert [len(part) for part in (etth1.train, etth1.val, etth1.test)] == [7825, 2785, 2785]


def test_standardised_with_the_training_rows(etth1, raw):
    header, _, values = raw
    mean, std = values[:8640].mean(axis=0), np.sqrt(((values[:8640] - values[:8640].mean(axis=0)) ** 2).mean(axis=0))
    assert etth1.names == header[1:]
    assert etth1.mean.dtype == etth1.std.dtype == torch.float64
    np.testing.assert_allclose(etth1.mean.numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(etth1.std.numpy(), std, rtol=1e-12)
    index = [0, 1234, 2784]
    batch = etth1.test[index]
    for number, window in enumerate(index):
        begin = 11520 - 720 + window
        expected = (values[begin : begin + 816] - mean) / std
        np.testing.assert_allclose(batch["x"][number], expected[:720], atol=1e-6)
        np.testing.assert_allclose(batch["y"][number], expected[720:], atol=1e-6)
    assert batch["x"].dtype == torch.float32
    assert batch["marks"].shape == (3, 720, etth1.num_marks)


def test_original_units(etth1, raw):
    y = etth1.to_original_units(etth1.test[[7]]["y"])
    assert y.dtype == torch.float32
    np.testing.assert_allclose(y[0], raw[2][11527 : 11527 + 96], atol=1e-5)
    assert etth1.to_original_units(y.half()).dtype == torch.float16


def test_dates(etth1, raw):
    dates = etth1.dates_of("test", 7)
    assert [str(date) for date in dates] == raw[1][11527 : 11527 + 96]
    assert str(etth1.dates_of("test", 2784)[-1]) == raw[1][14399]
    with pytest.raises(IndexError, match="2785 windows"):
        etth1.dates_of("test", 2785)


def test_future_window(etth1, raw):
    batch, dates = etth1.future_window()
    np.testing.assert_allclose(etth1.to_original_units(batch["x"])[0], raw[2][-720:], atol=1e-5)
    assert batch["marks"].shape == (1, 720, 4)
    assert raw[1][-1] == "2018-06-26 19:00:00"
    assert [str(dates[0]), str(dates[-1]), len(dates)] == ["2018-06-26 20:00:00", "2018-06-30 19:00:00", 96]


def test_series_is_held_once(etth1):
    for key in ("_values", "_marks"):
        whole = getattr(etth1, key)
        memory = range(whole.data_ptr(), whole.data_ptr() + 4 * whole.numel())
        assert all(getattr(part, key).data_ptr() in memory for part in (etth1.train, etth1.val, etth1.test))
    # Nothing else as long as the series, in float64 for instance.
    assert not [key for key, value in vars(etth1).items() if isinstance(value, np.ndarray)]
    assert etth1.train is etth1.train


def test_metrics_are_of_the_name_that_it_says(etth1):
    from exp.engine.distributed import Distributed

    metrics = etth1.metrics()
    batch = etth1.val[[0, 1]]
    metrics.update(batch["y"] + 2.0, batch)
    assert metrics.compute(Distributed())[metrics.names[0]] == pytest.approx(4.0)


@pytest.fixture
def monthly(tmp_path):
    def make(dates=True):
        rows = [f"{0.1},{n * n}" for n in range(60)]
        if dates:
            rows = ["date,flat,square", *(f"{2000 + n // 12}-{n % 12 + 1:02d}-01,{row}" for n, row in enumerate(rows))]
        Path(tmp_path / "m.csv").write_text("\n".join(rows))
        return ForecastingData("m", "m.csv", 2, str(tmp_path), "ratio", lookback=6, horizon=3, header=dates)

    return make


def test_constant_series(monthly):
    data = monthly()
    assert float(data.std[0]) == 1.0
    assert float(data.train[[0]]["x"][0, :, 0].abs().max()) < 1e-6


def test_future_dates_keep_the_rhythm_of_the_calendar(monthly):
    assert [str(date)[:10] for date in monthly().future_window()[1]] == ["2005-01-01", "2005-02-01", "2005-03-01"]


def test_without_dates(monthly):
    data = monthly(dates=False)
    assert data.dates_of("train", 0) is None
    assert data.future_window()[1] is None
    assert not data.train[[0]]["marks"].any()


def test_wrong_number_of_channels():
    with pytest.raises(DataError, match=r"ETTh1.csv row 1: has 7 series \(HUFL, .*data.channels=8"):
        ForecastingData("ETTh1", "ETTh1.csv", 8)


def test_lookback_too_long():
    data = ForecastingData("ETTh1", "ETTh1.csv", 7, split="ett_hour", lookback=8600)
    with pytest.raises(DataError, match=r"h1.csv: .*lookback \+ horizon can be at most 8640, the horizon at most 2880"):
        data.train  # noqa: B018 - the access raises
