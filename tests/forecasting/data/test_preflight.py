from __future__ import annotations

import gzip
import subprocess
import sys

import pytest

from exp.errors import ConfigError, DataError
from exp.forecasting.config import EvalKeys, ForecastingDataConfig
from exp.forecasting.data.preflight import check_task, preflight


def config(**changes):
    fields = {"name": "ETTh1", "file": "ETTh1.csv", "channels": 7, "split": "ett_hour", **changes}
    return vars(ForecastingDataConfig(**fields))


def refusal(**changes):
    with pytest.raises(DataError) as error:
        preflight(config(**changes))
    return str(error.value)


def test_bundled_file_passes():
    preflight(config())


def test_own_file_passes_with_an_absolute_path_too(tmp_path):
    (tmp_path / "solar_AL.txt.gz").write_bytes(gzip.compress(b"1,2\n3,4\n"))
    own = {"header": False, "channels": 2, "split": "ratio"}
    preflight(config(root=str(tmp_path), file="solar_AL.txt.gz", **own))
    preflight(config(file=str(tmp_path / "solar_AL.txt.gz"), **own))


def test_not_bundled():
    message = refusal(file="ETTh2.csv")
    assert message.splitlines()[0] == (
        "data.root is not set, and ETTh2.csv is not among the sample data of exp; "
        "set data.root to the folder that holds ETTh2.csv"
    )
    assert "ETTh1.csv" in message


def test_missing_file_tells_what_is_there(tmp_path):
    (tmp_path / "weather.csv").touch()
    (tmp_path / "ETT-small").mkdir()
    (tmp_path / "ETT-small" / "ETTh1.csv").touch()
    first, *more = refusal(root=str(tmp_path)).splitlines()
    assert f"data.file=ETTh1.csv (data set ETTh1) is not in data.root={tmp_path}" in first
    assert "header `date," in more[0]
    assert more[1].strip() == f"in {tmp_path}: ETT-small/, weather.csv"
    assert more[2].endswith(f"data.root={tmp_path}/ETT-small")


def test_missing_folder_tells_the_nearest_one(tmp_path):
    (tmp_path / "datasets").mkdir()
    message = refusal(root=str(tmp_path / "dataset" / "ett"))
    assert f"{tmp_path / 'dataset' / 'ett'} is no folder; in {tmp_path}: datasets/" in message


@pytest.mark.parametrize(
    ("content", "changes", "where"),
    [
        (b"", {}, "is empty"),
        (b"\n\n", {}, "is empty"),
        (b"time,a\n", {}, "row 1: no column `date`: the header is time, a; set data.date_column=time"),
        (b"date;a\n", {}, "row 1: its cells are separated by semicolons"),
        (b"date,a\n", {}, "has 1 series (a), but data.channels=7"),
        (b"1,2\n", {"header": False}, "has 2 series, but data.channels=7"),
        (b"date,a\n", {"header": False}, "row 1, column 1: 'date' is not a number"),
        (b"\xff\xfe\x00", {}, "is not UTF-8 text"),
    ],
)
def test_wrong_first_line(tmp_path, content, changes, where):
    path = tmp_path / "ETTh1.csv"
    path.write_bytes(content)
    first = refusal(root=str(tmp_path), **changes).splitlines()[0]
    assert str(path) in first
    assert where in first


def test_new_rows_with_another_number_of_series_are_not_met_by_data_channels(tmp_path):
    path = tmp_path / "new.csv"
    wanted = {"file": str(path), "split": "new", "channels": 3}
    path.write_text("date,a,b,c,extra\n")
    assert "such as data.inputs=[a,b,c]" in refusal(**wanted)
    path.write_text("date,a,air temp,c,extra\n")
    assert "such as 'data.inputs=[a,\"air temp\",c]'" in refusal(**wanted)
    path.write_text("date,a,b\n")
    message = refusal(**wanted)
    assert "the weights need all that they were trained on" in message
    assert "set data.channels" not in message
    path.write_text("date,a,b,c,extra\n")
    preflight(config(**wanted, inputs=["a", "b", "c"]))


def test_a_missing_file_with_a_path_of_its_own_is_expected_there(tmp_path):
    message = refusal(file=str(tmp_path / "nope.csv"), split="new")
    assert f"expected: {tmp_path}/nope.csv, comma-separated" in message
    assert "data.root>" not in message


def test_keys_of_intervals_are_judged_by_themselves():
    given = vars(EvalKeys())
    check_task({})
    check_task(given)
    check_task({**given, "intervals": [0.8, 0.95], "intervals_adapt": 0.01})
    for changed, says in (
        ({"intervals_from": "nonsense"}, "task.intervals_from=nonsense must be residuals or model"),
        ({"intervals_from": "model"}, "task.intervals_from=model needs task.intervals"),
        ({"intervals_adapt": 7}, "task.intervals_adapt=7 must be from 0"),
        ({"intervals_adapt": 0.1}, "task.intervals_adapt=0.1 needs task.intervals, such as task.intervals=[0.8,0.95]"),
        ({"intervals_signed": True}, "task.intervals_signed=true needs task.intervals"),
        ({"intervals": 0.8}, "task.intervals=0.8 must be a list: task.intervals=[0.8]"),
        ({"intervals": [80]}, "80 is no share between 0 and 1"),
        ({"intervals": ["most"]}, "must be a list of shares"),
        ({"intervals": [0.8], "intervals_memory_mb": 0}, "task.intervals_memory_mb=0 must be at least 1"),
    ):
        with pytest.raises(ConfigError) as error:
            check_task({**given, **changed})
        assert says in str(error.value)


def test_unknown_split():
    assert "data.split=thirds is not one of ett_hour, ett_minute, ratio" in refusal(split="thirds")


@pytest.mark.parametrize(
    ("key", "value"), [("lookback", 0), ("horizon", 0), ("eval_batch_size", 0), ("num_workers", -1)]
)
def test_numbers_out_of_range(key, value):
    assert f"data.{key}={value} must be at least {value + 1}" in refusal(**{key: value})


def test_imports_nothing_heavy():
    program = (
        "import sys, exp.forecasting.data.preflight as p;"
        f"p.preflight({config()});"
        "print(sorted({'torch', 'pandas', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
