from __future__ import annotations

import gzip
import subprocess
import sys

import pytest

from exp.errors import DataError
from exp.forecasting.config import ForecastingDataConfig
from exp.forecasting.data.preflight import preflight


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
