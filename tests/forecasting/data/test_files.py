"""Files as people have them: read right, or refused with the file, the row and the column."""

from __future__ import annotations

import contextlib
import csv
import gzip
import re
from datetime import datetime, timedelta

import numpy as np
import pytest

from exp.errors import EXIT_CONFIG, ConfigError, DataError
from exp.forecasting.data.files import check_task, preflight
from exp.forecasting.data.series import read_series
from exp.forecasting.keys import ForecastingDataConfig, IntervalKeys

GOOD = "date,a,b\n2020-01-01 00:00:00,1,2\n2020-01-01 01:00:00,3,4.5\n2020-01-01 02:00:00,-5,6e-1\n"
MASKED = {"missing": "mask"}


@pytest.fixture
def write(tmp_path):
    def write(content, name="s.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def read(path, **keys):
    """The series of a file; as many as it has, where no key tells."""
    text = (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig", errors="replace")
    first: list[str] = []
    with text, contextlib.suppress(OSError, EOFError, csv.Error):  # what is no text is refused below
        first = next(csv.reader(line for line in text if line.strip()), [])
    count = len(first) - (keys.get("header", True) and keys.get("date_column", "date") is not None)
    keys = {"name": "own", "file": path.name, "channels": len(keys.get("inputs", ())) or count, **keys}
    return read_series(path, ForecastingDataConfig(**keys))


def refusal(path, **keys):
    with pytest.raises(DataError) as error:
        read(path, **keys)
    assert error.value.exit_code == EXIT_CONFIG
    line = str(error.value).splitlines()[0]
    assert str(path) in line
    return line


def times(form, count=400, begin=datetime(2019, 12, 1), step=timedelta(hours=1)):
    return [(begin + number * step).strftime(form) for number in range(count)]


def file_of(dates, name="date", values=None):
    values = values or [number % 7 for number in range(len(dates))]
    return "\n".join([f"{name},a", *(f"{date},{value}" for date, value in zip(dates, values))]) + "\n"


@pytest.mark.parametrize(
    "content",
    [GOOD, GOOD.replace("\n", "\r\n"), "\ufeff" + GOOD, GOOD + "\n \n", GOOD.replace("2020-01-01", "2020/1/1"),
     gzip.compress(GOOD.encode(), mtime=0)],
    ids=["plain", "crlf", "byte order mark", "blank lines at the end", "slashes", "compressed"],
)  # fmt: skip
def test_a_table_with_dates(write, content):
    series = read(write(content, "s.csv.gz" if isinstance(content, bytes) else "s.csv"), channels=2)
    np.testing.assert_array_equal(series.values, [[1, 2], [3, 4.5], [-5, 0.6]])
    assert series.columns.names == ["a", "b"]
    assert [str(date) for date in series.dates.index] == [f"2020-01-01 0{hour}:00:00" for hour in range(3)]
    bare = read(write("0,1.5,2\n3,4,5\n"), header=False, channels=3)
    np.testing.assert_array_equal(bare.values, [[0, 1.5, 2], [3, 4, 5]])
    assert (bare.dates.index, bare.columns.names) == (None, ["0", "1", "2"])


FORMS = ["%d/%m/%Y %H:%M", "%m/%d/%Y %H:%M:%S", "%d.%m.%Y %H:%M", "%d-%m-%y %H:%M", "%m/%d/%Y %I:%M %p",
         "%d-%b-%Y %H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S.%f+01:00", "%Y/%m/%d %H",
         "%Y%m%d%H", "%Y%m%d%H%M", "%Y%m%d %H:%M"]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_dates_is_that_of_the_whole_column(write, form):
    # The first twelve days of December can be read with the month first; the later ones cannot.
    path = write(file_of(times(form, 40 * 24)))
    dates = read(path, date_format=form if "%y" in form else None).dates.index
    assert [*dates.strftime("%m%d%H%M")] == times("%m%d%H%M", 40 * 24)


EPOCH = [1_577_836_800 + 3600 * hour for hour in range(5)]  # from 2020-01-01 on
UNCLEAR = times("%d/%m/%Y", 12, datetime(2012, 12, 1), timedelta(days=1))


def test_other_forms_of_dates(write):
    for dates, form, last in (
        (["20240101", "20240102"], None, "2024-01-02 00:00:00"),  # not nanoseconds
        (times("%d/%m/%Y %H:%M", 24, datetime(2020, 3, 3)), None, "2020-03-03 23:00:00"),
        (UNCLEAR, "%d/%m/%Y", "2012-12-12 00:00:00"),
        ([3600, 7200], "%s", "1970-01-01 02:00:00"),
        *(([second * factor for second in EPOCH], None, "2020-01-01 04:00:00") for factor in (1, 10**3, 10**6, 10**9)),
    ):
        assert str(read(write(file_of(dates)), date_format=form).dates.index[-1]) == last


def test_dates_of_another_form_or_of_two_are_refused(write):
    odd = ("2019-12-01 02:00", "01/12/2019 02:00:00", "2019-12-01", "20191201", "noon", "NA")
    plain = times("%Y-%m-%d %H:%M:%S", 5)
    summer = [*times("%Y-%m-%d %H:%M:%S+01:00", 10), *times("%Y-%m-%d %H:%M:%S+02:00", 12)[11:]]
    mixed = ["01/02/2020", "31/12/2020", "2021-01-01"]
    for dates, form, *words in (
        *(([*plain[:2], each, *plain[3:]], None, "row 4, column date") for each in odd),
        ([*EPOCH[:2], 7, *EPOCH[3:]], None, "row 4, column date: '7'"),
        (summer, None, "row 12, column date"),
        (UNCLEAR, None, "row 2, column date", "%d/%m/%Y", "%m/%d/%Y"),
        (mixed, "%d/%m/%Y", "row 4, column date: '2021-01-01'"),
        (mixed, "dd/mm/yyyy", "row 2, column date", "is not a date in dd/mm/yyyy"),
        (mixed, "%Q", "%Q"),
    ):
        line = refusal(write(file_of(dates)), date_format=form)
        assert all(word in line for word in words), line


def test_the_column_of_dates_has_any_place_and_name_or_there_is_none(write):
    assert read(write("a, Date ,b c \n1,20240101,2\n3,20240102,4\n")).columns.names == ["a", "b c"]
    path = write(file_of(times("%Y-%m-%d %H:%M"), "time stamp"))
    assert "data.date_column='\"time stamp\"'" in refusal(path)
    assert read(path, date_column="Time Stamp").columns.names == ["a"]
    assert read(write("a,b\n1,2\n3,4\n"), date_column=None).dates.index is None


DAY = "2020-01-01,"
REFUSED = [
    # In place of a part of GOOD, or whole; the place that is named.
    *(("4.5", cell, f"row 3, column b: '{cell}'") for cell in ("n/a", "", "inf", "NaN", "-4e38", "True")),
    ("4.5", '"1,5"', "row 3, column b: '1,5'"),
    ("01:00:00", "25:00:00", "row 3, column date: '2020-01-01 25:00:00'"),
    ("2020-01-01 01:00:00", "", "row 3, column date: ''"),
    ("01:00:00", "00:00:00", "row 3, column date: '2020-01-01 00:00:00'"),
    ("3,4.5", "3,4.5,6", "Expected 3 fields in line 3, saw 4"),
    ("date,", "when,", "row 1"),
    (GOOD, "date\n2020-01-01\n", "no column"),
    (GOOD, "date,a\n0,2020-01-01,5\n1,2020-01-02,6\n", "row 2, column 3"),  # pandas takes it for an index
    (GOOD, f"date,a,b,\n{DAY}1,2,\n", "row 1, column 4"),
    (GOOD, ",date,a\n0,2020-01-01,1\n", "row 1, column 1"),
    (GOOD, f"date,a, a\n{DAY}1,2\n", "row 1, column 3: 'a'"),
    (GOOD, "date;p (mbar, abs);b\n", "semicolon"),
    (GOOD, f"date,place,a\n{DAY}Bonn,1\n2020-01-02,Bonn,2\n", "row 2, column place: 'Bonn'"),
    (GOOD, f"{DAY}1,2\n2020-01-02,3,4\n", "`date`"),
    (GOOD, "1,2\n3,4\n", "data.header=false"),
    (GOOD, "date,a\n12:00,1\n13:00,1\n", "row 2, column date: '12:00'"),
    (GOOD, f'date,a\n{DAY}1\n2020-01-02,"2', "row 3"),
    (GOOD, "date,a\n", "s.csv"),
    (GOOD, b"date,a\n2020-01-01,\xff\n", "UTF-8"),
    *((GOOD, "date,a\n2020-01-01,1\n".encode(code), "UTF-8") for code in ("utf-16", "utf-16-le")),
    (GOOD, "date,a\n2020-01-01,1\n2020-01-02,2\u00b0\n".encode("latin-1"), "UTF-8"),
    (GOOD, b"PAR1\x15\4\x15", "PAR1"),
    (GOOD, gzip.compress(b"date,a\n2020-01-01,1\n", mtime=0), ".gz"),
]


def test_the_first_cell_that_is_wrong_is_named(write):
    for old, new, place in REFUSED:
        path = write(new if old == GOOD else GOOD.replace(old, new, 1))
        assert place in refusal(path), new
    assert "data.channels=7" in refusal(write(GOOD), channels=7)
    assert "data.date_column=ds" in refusal(write("unique_id,ds,y\nA,2020-01-01,1\n"))
    long = sorted(f"2020-01-{day:02d},{plant},{day}\n" for plant in (7, 9) for day in range(1, 21))
    assert "data.id_column=plant data.targets=[y]" in refusal(write("date,plant,y\n" + "".join(long)))
    assert "data.header=true" in refusal(write(GOOD), header=False)
    assert "row 2, column 1: 'x'" in refusal(write("1,2\nx,4\n"), header=False)
    assert "row 1, column 2: ''" in refusal(write("1,\n3,4\n"), header=False)
    refusal(write(gzip.compress(GOOD.encode(), mtime=0)[:30], "s.csv.gz"))


def test_a_stray_quote_is_found_where_it_begins(write):
    rows = [f"2020-01-01 {hour:02d}:00:00,{hour}\n" for hour in range(24)]
    for cell, later in (('"5', "20"), ('"5"x', "20"), ('"5', '"20')):  # the last is closed by another stray one
        rows[4], rows[20] = f"2020-01-01 04:00:00,{cell}\n", f"2020-01-01 20:00:00,{later}\n"
        assert "row 6" in refusal(write("date,a\n" + "".join(rows)))


@pytest.mark.parametrize("header", [True, False])
def test_an_empty_cell_of_a_single_series_is_a_row(write, header):
    path = write("\n".join(["load"] * header + ["0.5", "", '""', "  ", "1.5"]) + "\n\n\n \n")
    options = {"header": header, "date_column": None}
    assert f"row {2 + header}, column" in refusal(path, **options)
    np.testing.assert_array_equal(read(path, **options, **MASKED).values[:, 0], [0.5, *[np.nan] * 3, 1.5])


def test_what_counts_as_empty(write):
    """A blank line is a row of empty cells; a row that is cut has none."""
    path = write("\na,b\n1,2\n , NAN \n\nnan,3\n4,\n\n")
    values = read(path, date_column=None, **MASKED).values
    np.testing.assert_array_equal(values, [[1, 2], *[[np.nan, np.nan]] * 2, [np.nan, 3], [4, np.nan]])
    assert "row 4, column a: ' '" in refusal(path, date_column=None)
    for cell in ("?", "-inf"):
        assert f"row 5, column a: '{cell}'" in refusal(write(f"\na,b\n1,2\n\n{cell},3\n"), date_column=None, **MASKED)
    for keys in (MASKED, {"inputs": ["a"]}):  # nor where the column that the cell lacks in is not read
        assert "row 3 has 2 of 3 cells" in refusal(write(GOOD.replace("3,4.5", "3")), **keys)
    assert "row 3, column date: ''" in refusal(write(GOOD.replace("\n2020-01-01 01", "\n\n2020-01-01 01")), **MASKED)


def preflight_of(**keys):
    preflight(vars(ForecastingDataConfig(**{"name": "own", "channels": 7, "file": "ETTh1.csv", **keys})))


def test_what_the_parent_sees_before_anything_starts(tmp_path):
    root, own = str(tmp_path), tmp_path / "own.csv"
    for name in ("ETT-small/ETTh1.csv", "dir.csv/weather.csv", "weather.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    new = {"root": root, "file": "own.csv", "split": "test_only", "channels": 3}
    for header, keys, *words in (
        ("", {"file": "ETTh2.csv"}, "data.root", "ETTh2.csv", "ETTh1.csv"),  # what is bundled
        ("", {"root": root}, "data.file=ETTh1.csv", "weather.csv", "ETT-small/"),
        ("", {"root": root, "file": "dir.csv"}, "dir.csv/"),
        ("", {"file": f"{root}/no.csv", "split": "test_only"}, f"{root}/no.csv"),
        ("", {"split": "thirds"}, "data.split=thirds"),
        ("", {"horizon": 0}, "data.horizon=0"),
        ("date,a\n", {**new, "split": "ratio"}, "data.channels=3"),
        ("date,a\n", {**new, "header": False}, "row 1, column 1: 'date'"),
        ("date,a,air temp,c,extra\n", new, "a, air temp, c, extra", "data.inputs"),
        ("date,a,b\n", new, "own.csv"),
    ):
        own.write_text(header)
        with pytest.raises(DataError) as error:
            preflight_of(**keys)
        assert all(word in str(error.value) for word in words), error.value
    own.write_text("date,a,b,c,extra\n")
    preflight_of(**new, inputs=["a", "b", "c"])


def test_keys_of_intervals_are_judged_by_themselves():
    for changed, named in (
        ({"intervals_method": "nonsense"}, "task.intervals_method=nonsense"),
        ({"intervals_calibrate": True}, "task.intervals_calibrate=true"),
        ({"intervals": [80]}, "task.intervals: 80"),
    ):
        with pytest.raises(ConfigError, match=re.escape(named)):
            check_task({**vars(IntervalKeys()), **changed})
