"""``data.inputs``, ``targets``, ``future_covariates`` and ``missing``: what a batch has, and what is scored."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from exp.engine.weights import read_weights
from exp.errors import ConfigError, DataError
from exp.forecasting.data.files import preflight
from exp.forecasting.data.series import Column
from exp.forecasting.keys import ForecastingDataConfig
from exp.forecasting.model import Forecaster
from tests.conftest import TINY
from tests.docs.reader import ROOT, write_files

NAMES = ["pump", "temp", "flow"]


@pytest.fixture
def values():
    """Three series; some cells of each are empty."""
    values = np.random.default_rng(0).normal(size=(200, 3)).round(3)
    values[[0, 30, 31, 170], 0] = values[171, 1] = values[175, 2] = np.nan
    return values


@pytest.fixture
def plant(made):
    return lambda values, **keys: made(pd.DataFrame(values, columns=NAMES), **{"missing": "mask", **keys})


def test_empty_cells_are_filled_where_they_are_seen_and_nan_where_they_are_truth(plant, values):
    data = plant(values)
    np.testing.assert_allclose(data.mean, np.nanmean(values[:140], axis=0))
    np.testing.assert_allclose(data.std, np.nanstd(values[:140], axis=0))
    assert data.train[[0]]["x"][0, 0, 0] == 0.0  # nothing before it: the mean
    seen = data.train[[20]]["x"][0, :, 0]  # rows 20 to 43
    assert seen[10] == seen[11] == seen[9]
    batch = data.test[torch.arange(len(data.test))]
    truth = np.stack([values[160 + n : 168 + n] for n in range(len(data.test))])
    np.testing.assert_array_equal(batch["observed"].numpy(), ~np.isnan(truth))
    np.testing.assert_allclose(data.to_original_units(batch["y"].double()), truth, atol=1e-6)
    there = plant(values, targets=["flow"], future_covariates=["temp"], device_cache=True).test
    cut = there.device_builder(torch.device("cpu"), None)(torch.tensor([5, 0, 17]))
    torch.testing.assert_close(cut, there[[5, 0, 17]], rtol=0, atol=0, equal_nan=True)


def ahead_of(data, column=0):
    """Dates of the forecast, and one column of ``future``."""
    window, (dates,) = data.future_windows()
    return [str(date) for date in dates], window["future"][0, :, column].double() * data.std[0] + data.mean[0]


def test_covariates_come_ahead_and_beyond_the_last_target(plant, values):
    plan = np.full((8, 3), np.nan)  # of the pump
    plan[:, 0] = np.arange(8) + 0.5
    values = np.concatenate([values, plan])
    data = plant(values, future_covariates=["pump"])
    batch = data.test[[3]]
    begin = int(data.rows["test"][0, 0]) + 3 + 24
    pump = values[begin : begin + 8, 0]
    later = batch["future"][0, :, 0].double() * data.std[0] + data.mean[0]
    np.testing.assert_allclose(later[~np.isnan(pump)], pump[~np.isnan(pump)], atol=1e-6)
    assert batch["observed"][0, :, 0].sum() == 0
    dates, ahead = ahead_of(data)
    assert [dates[place] for place in (0, -1)] == ["2020-01-09 08:00:00", "2020-01-09 15:00:00"]
    np.testing.assert_allclose(ahead, [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5], atol=1e-6)
    np.testing.assert_allclose(data.future_windows()[0]["future"][0, :, 1], np.arange(8, 16) / 23 - 0.5, atol=1e-6)
    assert plant(values, future_covariates=[]).test[[0]]["future"].shape[-1] == 4


def test_a_covariate_that_is_not_known_ahead_is_an_error_with_rows_and_columns(plant, values):
    plan = np.full((6, 3), np.nan)
    plan[:, 0] = plan[:, 1] = 1.0
    plan[2, 1] = np.nan
    longer = np.concatenate([values, plan])
    with pytest.raises(DataError) as refused:
        plant(longer, future_covariates=["pump", "temp"]).future_windows()
    late = "row 208 (2020-01-09 14:00:00), row 209 (2020-01-09 15:00:00)"
    assert (
        f"s.csv: the forecast takes data.future_covariates as known, and there is no value of pump in {late}; nor of "
        "temp in "
        f"row 204 (2020-01-09 10:00:00), {late};" in str(refused.value)
    )
    with pytest.raises(DataError, match=r"no value of temp in row 204 \(2020-01-09 10:00:00\);"):
        plant(longer, targets=["flow"], future_covariates=["temp"], horizon=6).future_windows()
    plant(longer, targets=["flow"], future_covariates=["temp"], horizon=2).future_windows()


class Weekend(Column):
    def values(self, rows):
        return rows.index.day_of_week >= 5


class Twice(Column):
    def __init__(self, of):
        self.of = of

    def values(self, rows):
        return rows[self.of] * 2


def test_a_computed_covariate_is_computed_ahead(plant, values):
    """From Saturday, July 18; what is computed from cells is known where these are."""
    here = __name__
    columns = {"weekend": {"_target_": f"{here}.Weekend"}, "twice": {"_target_": f"{here}.Twice", "of": "pump"}}
    data = plant(values, freq="D", derived_columns=columns, channels=5, future_covariates=["weekend"])
    window, (dates,) = data.future_windows()
    assert [str(date)[:10] for date in dates[:2]] == ["2020-07-19", "2020-07-20"]
    assert window["future"].shape == (1, 8, 5)
    found = window["future"][0, :, 0].double() * data.std[3] + data.mean[3]
    np.testing.assert_allclose(found, [1, 0, 0, 0, 0, 0, 1, 1], atol=1e-6)
    with pytest.raises(DataError, match=r"no value of twice in row 202 \(2020-07-19"):
        plant(
            values, freq="D", derived_columns=columns, channels=5, future_covariates=["weekend", "twice"]
        ).future_windows()


class Past(Forecaster):
    """Uses the lookback alone."""

    messages = ("the key gauge has its least value",)

    def forward(self, x, mode="tensor", **_):
        return x[:, -1:].expand(-1, 8, -1)


class Future(Past):
    def forward(self, x, future, mode="tensor", **_):
        return x[:, -1:] + future.mean(dim=2, keepdim=True)


class Any(torch.nn.Module):
    """Names no value of a batch: it may use each."""

    def forward(self, **batch):
        return batch["x"][:, -8:]


class Single(Past):
    max_targets = 1


def checked(data, model):
    """What a run says of data and model, without the data's own lines."""
    said, actions = [], []
    config = OmegaConf.create({"task": {"name": "predict"}, "model": {}})
    data.setup(SimpleNamespace(print=said.append, on_model=actions.append, config=config))
    for action in actions:
        action(model)
    assert data.record(list).get("notes", []) == data.notes
    assert said[1:] == data.notes
    return said[1:]


def test_what_a_model_declares_is_compared_with_what_the_data_have(plant, values):
    """What ``forward`` takes decides: a key without use is named, a needed key that is missing is refused."""
    unused = (
        "does not use the future of data.future_covariates (the time features): they are inputs over the lookback only"
    )
    future = {"future_covariates": []}
    assert checked(plant(values, **future), Past()) == [*Past.messages, f"Past {unused}"]
    assert checked(plant(values), Past()) == [*Past.messages]
    assert checked(plant(values, **future), Future()) == [*Past.messages]
    assert checked(plant(values, **future), Any()) == []
    assert checked(plant(values, targets=["flow"]), Single()) == [*Past.messages]
    for model, named in ((Future(), "needs future.*data.future_covariates"), (Single(), "up to 1 .*3; .*data.targets")):
        with pytest.raises(ConfigError, match=named):
            checked(plant(values), model)
    longer = np.concatenate([values, np.full((3, 3), 0.5) * [np.nan, np.nan, 1]])
    for model in (Past(), Any()):  # rows ahead lack values that only one of them may use
        data = plant(longer, future_covariates=["flow"])
        checked(data, model)
        if isinstance(model, Past):
            assert data.future_windows()[0]["future"].shape == (1, 8, 5)
        else:
            with pytest.raises(DataError, match="no value of flow in row 205"):
                data.future_windows()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"missing": "drop"}, "data.missing=drop"),
        ({"targets": ["flw"]}, "'flow'"),
        ({"targets": ["pump"], "future_covariates": ["pump"]}, "'pump'.*data.future_covariates"),
        ({"future_covariates": NAMES}, "data.future_covariates"),
        ({"targets": ["flow", "flow"]}, "data.targets"),
        ({"targets": []}, r"data.targets=\[\]"),
        ({"inputs": ["flow"]}, "data.channels=1"),
        ({"inputs": ["flow"], "channels": 1, "targets": ["temp"]}, "'temp'"),
    ],
)
def test_roles_that_cannot_be_are_refused_before_anything_starts(plant, values, keys, named):
    config = {"name": "plant", "file": str(plant(values).path), "channels": 3, "missing": "mask", **keys}
    with pytest.raises(DataError, match=named):
        preflight(vars(ForecastingDataConfig(**config)))


def test_rows_that_are_known_ahead_are_in_no_part(plant, values):
    before = plant(values, future_covariates=["temp"])
    longer = np.concatenate([values, np.full((60, 3), 0.5) * [np.nan, 1, np.nan]])
    after = plant(longer, future_covariates=["temp"])
    assert {name: rows.tolist() for name, rows in after.rows.items()} == {
        name: rows.tolist() for name, rows in before.rows.items()
    }
    assert after.observed_stops.tolist() == [200]
    assert torch.equal(after.mean, before.mean)
    new = plant(longer, future_covariates=["temp"], split="test_only")
    new.load_state_dict(before.state_dict())
    assert new.rows["test"].tolist() == [[0, 260]]


def test_a_part_without_any_truth_is_refused(plant, values):
    values[140:160, 2] = np.nan  # all of validation's rows
    plant(values).check_truth(["train", "val", "test"])
    data = plant(values, inputs=["flow"], targets=["flow"], channels=1)  # one series alone
    np.testing.assert_allclose(data.mean, np.nanmean(values[:140, 2]))
    data.check_truth(["train", "test"])
    with pytest.raises(DataError, match=r"flow .*val .*141 to 160"):
        data.check_truth(["train", "val", "test"])
    with pytest.raises(DataError, match=r"s.csv, column flow"):
        plant(values * [1, 1, np.nan]).check_truth(["train"])


OIL = """
defaults: [/schema/data/forecasting@_here_, _self_]
name: oil
file: {file}
channels: 8
targets: [OT]
derived_columns:
  weekend: {{_target_: my_columns.Weekend}}
  HUFL: {{_target_: my_columns.Asinh, of: OT}}
"""


def test_a_column_type_of_ones_own_is_one_module_and_one_yaml(exp):
    write_files(ROOT / "docs" / "guide" / "data.md", exp.folder, python=["my_columns.py"])
    exp.path("my_conf/data").mkdir(parents=True)
    exp.path("my_conf/data/oil.yaml").write_text(OIL.format(file=exp.path("oil.csv")))
    rows = pd.read_csv(ROOT / "data" / "ett" / "ETTh1.csv", nrows=900)
    rows.to_csv(exp.path("oil.csv"), index=False)
    words = ["--config-dir", "my_conf", *TINY, "data=oil", "data.horizon=24"]
    done = exp(*words, "output_dir=run")
    assert done.returncode == 0, done.stderr
    weights = ["backend=cpu", "task=predict", "init_from=run", "plots=false", "plugins=[my_columns]"]
    done = exp(*weights, "task.input=oil.csv", "output_dir=next")
    assert done.returncode == 0, done.stderr
    state = read_weights(exp.path("run")).data
    assert state["names"] == [*list(rows)[1:], "weekend"]
    train, weekend = rows[:630], pd.to_datetime(rows["date"][:630]).dt.day_of_week >= 5
    assert state["mean"][0] == pytest.approx(np.arcsinh(train["OT"]).mean())
    assert state["mean"][-1] == pytest.approx(weekend.mean())
    exp.path("short.py").write_text("from my_columns import Column\nclass Short(Column): values = lambda *_: [1.0]\n")
    for target in ("collections.OrderedDict", "short.Short"):
        done = exp(
            *words, f"data.derived_columns={{weekend: {{_target_: {target}}}}}", "plugins=[short]", "output_dir=no"
        )
        assert (done.returncode, "data.derived_columns.weekend" in done.stderr) == (2, True), done.stderr
