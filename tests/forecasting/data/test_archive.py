"""The folder of the Time-Series-Library's data archive, as it is, for every published set."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate

from exp.config.sources import register
from exp.errors import DataError
from exp.forecasting.data.files import preflight
from exp.forecasting.data.series import read_series
from exp.forecasting.keys import ForecastingDataConfig

# File in the archive; series; first date as it is written, rows apart; windows of 24 + 8 rows in each part.
RATIO = (140 - 31, 20 - 7, 40 - 7)  # of 200 rows
PEMS = (120 - 31, 40 - 31, 40 - 31)
ETT_HOUR, ETT_MINUTE = (8640 - 31, 2880 - 7, 2880 - 7), (34560 - 31, 11520 - 7, 11520 - 7)
SETS = {
    "etth1": ("ETT-small/ETTh1.csv", 7, "2016-07-01 00:00:00", "1h", ETT_HOUR),
    "ettm1": ("ETT-small/ETTm1.csv", 7, "2016-07-01 00:00:00", "15min", ETT_MINUTE),
    "weather": ("weather/weather.csv", 21, "2020-01-01 00:10:00", "10min", RATIO),
    "electricity": ("electricity/electricity.csv", 321, "2016-07-01 02:00:00", "1h", RATIO),
    "traffic": ("traffic/traffic.csv", 862, "2015-01-01 00:00:01", "1h", RATIO),
    "exchange": ("exchange_rate/exchange_rate.csv", 8, "1990/1/1 0:00", "1D", RATIO),
    "illness": ("illness/national_illness.csv", 7, "2002-01-01 00:00:00", "7D", RATIO),
    "solar": ("Solar/solar_AL.txt", 137, None, None, RATIO),
    "pems03": ("PEMS/PEMS03.npz", 358, None, None, PEMS),
    "pems08": ("PEMS/PEMS08.npz", 170, None, None, PEMS),
}


def write(path, values, first, step):
    """A file in the notation of the published one."""
    path.parent.mkdir()
    if path.suffix == ".npz":
        np.savez(path, data=np.stack([values, values * 0 - 1, values * 0 - 2], axis=-1))
        return
    table = pd.DataFrame(values)
    if first is not None:
        dates = pd.date_range(first, periods=len(values), freq=step)
        table.insert(0, "date", dates.strftime("%Y/%-m/%-d %-H:%M" if "/" in first else "%Y-%m-%d %H:%M:%S"))
    table.to_csv(path, index=False, header=first is not None)


@pytest.mark.parametrize("name", SETS)
def test_the_archive_is_read_as_it_is(name, tmp_path):
    file, channels, first, step, windows = SETS[name]
    register()
    with initialize_config_module("exp.conf", version_base="1.3"):
        overrides = [f"+data={name}", f"data.root={tmp_path}", "data.lookback=24", "data.horizon=8"]
        config = compose(overrides=overrides).data
    with pytest.raises(DataError, match=file.rpartition("/")[2]):
        preflight(config)
    rows = {ETT_HOUR: 14500, ETT_MINUTE: 57700}.get(windows, 200)
    values = np.arange(rows)[:, None] % 97 + np.arange(channels) / 1024
    write(tmp_path / file, values, first, step)
    preflight(config)
    data = instantiate(config)
    assert (len(data.train), len(data.val), len(data.test)) == windows
    known = data.to_original_units(data.test[[0]]["y"].double())[0].numpy()
    begin = int(data.rows["test"][0, 0]) + 24
    np.testing.assert_allclose(known, values[begin : begin + 8], atol=1e-4)
    assert data.test[[0]]["marks"].any() == (first is not None) == (data.future_windows()[1][0] is not None)
    if first is not None:
        assert (data.dates[0], data.calendar.irregular) == (pd.Timestamp(first), 0)
    (tmp_path / file).rename(tmp_path / file.rpartition("/")[2])  # the file itself in the folder: as before
    assert instantiate(config).num_rows == rows


def test_other_arrays_are_refused(tmp_path):
    path = tmp_path / "PEMS08.npz"
    values = np.ones((200, 170, 3))
    values[70, 3, 0] = np.nan
    for content, names in (
        ({"flow": np.zeros((9, 170))}, "`data`"),
        ({"data": np.zeros((9, 3, 1))}, "data.channels=170"),
        ({"data": np.zeros(170)}, "170"),
        ({"data": np.array([[{}]])}, "data"),
        ({"data": values}, r"data\[70, 3\]"),
        (None, "PEMS08"),
    ):
        path.write_bytes(b"PK nothing") if content is None else np.savez(path, **content)
        with pytest.raises(DataError, match=names):
            read_series(path, ForecastingDataConfig(name="PEMS08", file=path.name, channels=170))
