"""Tables of many series: arranged, split, standardized and cut into windows series by series; odd tables."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest
import torch

from exp.errors import DataError
from exp.forecasting.data.dataset import ForecastingData
from exp.forecasting.metrics import ForecastMetrics

LENGTHS = {"b": 60, "a": 45, "NA": 33, "7": 9}
KEYS = {"lookback": 6, "horizon": 2, "channels": 1, "id_column": "unique_id", "date_column": "ds", "targets": ["y"]}


class Alone:
    """The collectives of a single process."""

    def sum(self, tensor):
        return tensor

    def gather(self, value):
        return [value]


def rows_of(lengths=LENGTHS, freq="D", seed=0):
    """A table of series that start at different dates, with a level each, shuffled."""
    draws = np.random.default_rng(seed)
    parts = [
        pd.DataFrame({
            "unique_id": name,
            "ds": pd.date_range("2024-01-01", periods=90, freq=freq)[start : start + length],
            "y": 100.0 * (start + 1) + draws.normal(size=length).cumsum(),
        })
        for start, (name, length) in enumerate(lengths.items())
    ]  # fmt: skip
    return pd.concat(parts).sample(frac=1.0, random_state=seed).reset_index(drop=True)


@pytest.fixture
def panel(tmp_path):
    def make(table, **keys):
        table.to_csv(tmp_path / "s.csv", index=False)
        return ForecastingData(name="s", file=str(tmp_path / "s.csv"), **{**KEYS, **keys})

    return make


def test_a_column_for_each_series_is_the_same_table(panel):
    """Each begins and ends with its first and last value; an empty cell between them is named by row and column."""

    def windows(data):
        return sorted(data.ids), sorted(data.train[torch.arange(len(data.train))]["x"].flatten(1).tolist())

    table = rows_of()
    wide = table.pivot(index="ds", columns="unique_id", values="y").reset_index()
    assert windows(panel(table)) == windows(panel(wide, melt=True, targets=None))
    wide.loc[20, "a"] = float("nan")
    with pytest.raises(DataError, match=r"s\.csv row 22, column a"):
        windows(panel(wide, melt=True, targets=None))
    with pytest.raises(DataError, match="column b is empty"):
        windows(panel(wide.assign(b=float("nan")), melt=True, targets=None))


def test_windows_are_those_of_each_series(panel):
    table = rows_of()
    data = panel(table)
    whole, found = {name: part.sort_values("ds")["y"].to_numpy() for name, part in table.groupby("unique_id")}, []
    assert sorted(data.ids) == sorted(LENGTHS)
    for split, (begin, stop) in {"train": (0.0, 0.7), "val": (0.7, 0.8), "test": (0.8, 1.0)}.items():
        expected = []
        for name in data.ids:
            values, count = whole[name], len(whole[name])
            ends = {0.0: 0, 0.7: int(0.7 * count), 0.8: count - int(0.2 * count), 1.0: count}
            train = values[: max(ends[0.7], min(count, 6))]
            scaled = (values - train.mean()) / train.std()
            first = max(ends[begin] - 6, 0) if split != "train" else 0
            expected += [scaled[row : row + 8] for row in range(first, ends[stop] - 7)]
        batch = getattr(data, split)[list(range(len(expected)))]
        found = torch.cat([batch["x"], batch["y"]], dim=1)[..., 0]
        np.testing.assert_allclose(found, expected, atol=1e-4)
    cut = data.test.device_builder(torch.device("cpu"), None)
    numbers = torch.tensor([3, 0, 11])
    on_device = cut(data.test.sample_ids(numbers))
    torch.testing.assert_close(on_device, data.test[numbers], rtol=0, atol=0, check_stride=True)
    torch.testing.assert_close(pickle.loads(pickle.dumps(data.test))[numbers], data.test[numbers])
    assert not any("series have fewer" in note for note in data.notes)
    drawn = panel(table, sampling="series").train
    counts = [len(whole[name]) for name in data.ids]
    keys = torch.stack([torch.arange(len(drawn)), torch.zeros(len(drawn), dtype=torch.int64)], dim=1)
    series = np.searchsorted(np.cumsum(counts), drawn.sample_ids(keys).numpy(), side="right")
    assert set(np.bincount(series, minlength=4).tolist()) == {len(drawn) // 3, 0}  # one is too short
    first = drawn.sample_ids(keys)
    keys[:, 1] = 1
    assert not torch.equal(drawn.sample_ids(keys), first)


def test_metrics_of_each_series_and_their_mean(panel):
    table = rows_of()
    data = panel(table)
    metric = data.metrics(detailed=True)
    metric = metric if isinstance(metric, ForecastMetrics) else metric[0]
    expected, squared = {}, []
    season = data.state_dict()["season"]
    for begin in range(0, len(data.test), 5):
        batch = data.test[list(range(begin, min(begin + 5, len(data.test))))]
        metric.update(batch["x"][:, -1:].expand(-1, 2, -1), batch)
    for name, part in table.groupby("unique_id"):
        values = part.sort_values("ds")["y"].to_numpy()
        train, end = max(int(0.7 * len(values)), 6), len(values) - int(0.2 * len(values))
        first = max(end - 6, 0)
        errors = [np.abs(values[row + 6 : row + 8] - values[row + 5]) for row in range(first, len(values) - 7)]
        squared += [(error / values[:train].std()) ** 2 for error in errors]
        if errors and train > season:
            scale = np.abs(values[season:train] - values[: train - season]).mean()
            expected[name] = np.mean(errors) / scale
    found = metric.compute(Alone())
    assert season == 7
    assert found["mse"] == pytest.approx(np.mean(squared), rel=1e-4)
    assert found["mase"] == pytest.approx(np.mean(list(expected.values())), rel=1e-4)
    by_series = next(each for each in metric.tables() if each.name == "per_series")
    values = dict(zip(by_series.rows, by_series.columns["mase"]))
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_missing_rows_and_odd_tables(panel, tmp_path):
    table = rows_of()
    dates = sorted(table.loc[table["unique_id"] == "a", "ds"])
    holes = table[~((table["unique_id"] == "a") & table["ds"].isin(dates[10:13]))]
    with pytest.raises(DataError, match=r"'a'.*3 rows are missing in 1 of 4 series.*data\.missing=mask"):
        len(panel(holes).train)
    data = panel(holes, missing="mask")
    assert (data.num_rows, int(data.test[[0]]["observed"].sum())) == (len(table), 2)
    position = data.ids.index("a")
    truth = data.lookback_rows(int(data.starts[position]) + 8)[:, 0]
    assert truth.isnan().tolist() == [False, False, True, True, True, False]
    assert data.dates[int(data.starts[position]) + 10 : int(data.starts[position]) + 13].tolist() == dates[10:13]
    twice = pd.concat([table, table[table["unique_id"] == "b"].iloc[:1]])
    mixed = table.assign(ds=table["ds"].astype(str)).replace({"ds": {"2024-02-01": "01.02.2024"}})
    zones = table.assign(ds=table["ds"].astype(str) + np.where(table.index == 9, " 00:00+02:00", " 00:00+01:00"))
    unnamed = table.assign(unique_id=table["unique_id"].where(table.index != 4, ""))
    single = table.groupby("unique_id").head(1)
    hourly = pd.concat([table, rows_of({"d": 40}, "h")])
    for odd, words in (
        (twice, f"row {len(table) + 2}, .*series 'b'.*repeats"), (mixed, "01.02.2024"), (zones, "row 11.*02:00"),
        (unnamed, "row 6.*is empty"), (single, "too few"), (hourly, "series 'd'.*one frequency"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=words):
            len(panel(odd).train)
    with pytest.raises(DataError, match=r"data.targets: 'price' is not among"):
        len(panel(table, targets=["price"]).train)
    robust = panel(table, scaling="robust")
    values = table[table["unique_id"] == "a"].sort_values("ds")["y"].to_numpy()[:31]
    assert float(robust.mean[robust.ids.index("a")]) == pytest.approx(np.median(values))
    one = panel(table[table["unique_id"] == "b"], missing="mask")
    assert (one.ids, len(one.train)) == (["b"], 42 - 7)
    constant = panel(table.assign(y=table["y"].where(table["unique_id"] != "a", 5.0)))
    assert len(constant.train)
    assert [note for note in constant.notes if "constant" in note and " a;" in note]
    steps = table.assign(ds=table.groupby("unique_id")["ds"].rank().astype(int))
    assert panel(steps).dates is None
    torch.testing.assert_close(panel(steps).train[[5, 30]]["x"], panel(table).train[[5, 30]]["x"])
    with pytest.raises(DataError, match=r"'a'.*3 rows are missing"):
        len(panel(steps.drop(holes.index.symmetric_difference(table.index))).train)


def test_new_series_and_static_columns_with_the_weights_of_others(panel):
    table = rows_of().assign(size=lambda rows: rows["unique_id"].map({"b": 1, "a": 2, "NA": 3, "7": 4}))
    table["kind"] = table["unique_id"].map({"b": "shop", "a": "shop", "NA": "kiosk", "7": "kiosk"})
    before = panel(table, static=["size", "kind"])
    state, numbers = before.state_dict(), torch.arange(4.0)
    static = before.train[[0]]["static"][0]
    number = table["unique_id"].tolist().index(before.ids[0])
    size = (table["size"][number] - 2.5) / float(numbers.std(unbiased=False))
    assert static.tolist() == pytest.approx(
        [size, *[2.0 * (table["kind"][number] == kind) - 1.0 for kind in ("kiosk", "shop")]]
    )
    new = rows_of({"b": 60, "z": 40}).assign(size=1, kind="stall")
    after = panel(new, static=["size", "kind"], split="test_only")
    after.load_state_dict(state)
    assert any("1 of 2 series are new" in note for note in after.notes)
    known, first = after.ids.index("b"), new[new["unique_id"] == "z"].sort_values("ds")["y"].to_numpy()[:6]
    assert after.mean[known] == before.mean[before.ids.index("b")]
    assert float(after.mean[1 - known]) == pytest.approx(first.mean())
    assert after.test[[0]]["static"][0, 1:].tolist() == [-1.0, -1.0]  # neither
    batch, dates = after.future_windows([0, 1])
    assert batch["static"].shape == (2, 3)
    last = new.groupby("unique_id")["ds"].max()
    assert [when[0] - last[name] for when, name in zip(dates, after.ids)] == [pd.Timedelta("1D")] * 2
    with pytest.raises(DataError, match="changes within a series"):
        len(panel(table, static=["y"]).train)


def test_future_covariates_of_each_series(panel):
    table = rows_of().assign(price=lambda rows: rows["ds"].dt.day * 1.0)
    last = table.groupby("unique_id")["ds"].transform("max")
    table.loc[table["ds"] > last - pd.Timedelta("2D"), "y"] = np.nan
    data = panel(table, future_covariates=["price"], channels=2, missing="mask")
    lengths = np.diff(data.starts)
    assert (data.observed_stops - data.starts[:-1]).tolist() == (lengths - 2).tolist()
    batch, dates = data.future_windows([0, 1, 2])
    price = batch["future"][..., 0].double() * data.std[:3, 1:] + data.mean[:3, 1:]
    assert price.numpy() == pytest.approx(np.array([when.day.tolist() for when in dates]))
    with pytest.raises(DataError, match=r"of series '[^']+' takes"):
        panel(table.assign(price=table["price"].where(table["y"].notna())), future_covariates=["price"], channels=2,
              missing="mask").future_windows([0, 1, 2])  # fmt: skip
