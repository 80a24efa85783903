from __future__ import annotations

import gzip

import numpy as np
import pytest

from exp.errors import EXIT_CONFIG, DataError
from exp.forecasting.data.series import read_series

GOOD = "date,a,b\n2020-01-01 00:00:00,1,2\n2020-01-01 01:00:00,3,4.5\n2020-01-01 02:00:00,-5,6e-1\n"


@pytest.fixture
def write(tmp_path):
    def write(text, name="s.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def first_line(path, **options):
    with pytest.raises(DataError) as error:
        read_series(path, **options)
    assert error.value.exit_code == EXIT_CONFIG
    line = str(error.value).splitlines()[0]
    assert str(path) in line
    return line


def test_csv_with_dates(write):
    path = write(GOOD)
    series = read_series(path, channels=2)
    np.testing.assert_array_equal(series.values, [[1, 2], [3, 4.5], [-5, 0.6]])
    assert series.values.dtype == np.float64
    assert series.names == ("a", "b")
    assert [str(date) for date in series.dates] == [f"2020-01-01 0{hour}:00:00" for hour in range(3)]
    assert series.path == path


@pytest.mark.parametrize(
    "text",
    [GOOD.replace("\n", "\r\n"), "\ufeff" + GOOD, GOOD + "\n \n", GOOD.replace("2020-01-01", "2020/1/1")],
    ids=["crlf", "byte order mark", "blank lines at the end", "slashes"],
)
def test_harmless_variants(write, text):
    series = read_series(write(text))
    np.testing.assert_array_equal(series.values, read_series(write(GOOD, "good.csv")).values)
    assert str(series.dates[2]) == "2020-01-01 02:00:00"


@pytest.mark.parametrize("name", ["solar.txt", "solar.txt.gz"])
def test_numbers_only(write, name):
    text = b"0,1.5,2\n3,4,5\n"
    series = read_series(
        write(gzip.compress(text, mtime=0) if name.endswith("gz") else text, name), header=False, channels=3
    )
    np.testing.assert_array_equal(series.values, [[0, 1.5, 2], [3, 4, 5]])
    assert series.dates is None
    assert series.names == ("0", "1", "2")


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("4.5", "n/a", "row 3, column b: 'n/a' is not a finite number; fill the gap"),
        ("4.5", "", "row 3, column b: '' is not a finite number; fill the gap"),
        ("4.5", "inf", "row 3, column b: 'inf' is not a finite number"),
        ("4.5", "NaN", "row 3, column b: 'NaN' is not a finite number"),
        ("4.5", "True", "row 3, column b: 'True' is not a finite number; write it with digits"),
        ("1,2\n", "True,2\n", "row 2, column a: 'True' is not a finite number"),
        ("01:00:00", "25:00:00", "row 3, column date: '2020-01-01 25:00:00' is not a date"),
        ("2020-01-01 01:00:00", "", "row 3, column date: '' is not a date"),
        ("01:00:00", "00:00:00", "row 3, column date: '2020-01-01 00:00:00' repeats the date before it"),
        ("02:00:00", "00:30:00", "row 4, column date: '2020-01-01 00:30:00' is earlier than the date before it"),
        ("3,4.5", "3", "row 3, column 3: the row has 2 cells, but the first row has 3"),
        ("3,4.5", "3,4.5,6", "row 3, column 4: the row has 4 cells, but the first row has 3"),
        ("1,2\n", "1,2,7\n", "row 2, column 4: the row has 4 cells, but the first row has 3"),
        ("date,", "when,", "row 1: no column `date`: the header is when, a, b; set data.date_column to"),
        ("date,a,b", "date", "row 1: there is a `date` column, but no series"),
    ],
)
def test_first_offending_cell_is_named(write, old, new, where):
    text = GOOD.replace(old, new, 1)
    if new == "date":
        text = "date\n2020-01-01\n"
    assert where in first_line(write(text))


def test_rows_are_counted_as_lines_of_the_file(write):
    # pandas skips blank lines; an editor does not.
    assert "row 5, column b: 'x'" in first_line(write(GOOD.replace("4.5", "4.5\n").replace("6e-1", "x")))


def test_the_first_of_several_faults_is_named(write):
    assert "row 2, column b: 'x'" in first_line(write(GOOD.replace("2\n", "x\n", 1).replace("-5", "y")))


@pytest.mark.parametrize("dates", [["1", "2"], ["p", "q"], ["12:00", "13:00"]])
def test_row_numbers_words_and_times_of_day_are_no_dates(write, dates):
    rows = "".join(f"{date},1\n" for date in dates)
    assert f"row 2, column date: {dates[0]!r} is not a date" in first_line(write("date,a\n" + rows))


def test_a_column_of_labels_without_a_name_is_ragged(write):
    # pandas takes it for an index, without a word.
    assert "row 2, column 3: the row has 3 cells" in first_line(write("date,a\n0,2020-01-01,5\n1,2020-01-02,6\n"))


def test_channel_count(write):
    line = first_line(write(GOOD), channels=7)
    assert "2 series (a, b)" in line
    assert "data.channels=7" in line


def test_wrong_header_setting(write):
    assert "set data.header=true" in first_line(write(GOOD), header=False)
    assert "set data.header=false" in first_line(write("1,2\n3,4\n"))


def test_numbers_only_with_a_bad_cell(write):
    assert "row 2, column 1: 'x' is not a finite number" in first_line(write("1,2\nx,4\n"), header=False)
    assert "row 1, column 2: '' is not a finite number" in first_line(write("1,\n3,4\n"), header=False)


@pytest.mark.parametrize(
    ("content", "name", "what"),
    [
        (b"", "s.csv", "is empty"),
        (b"date,a\n", "s.csv", "is empty below its header"),
        (b"date,a\n2020-01-01,\xff\n", "s.csv", "is not UTF-8 text"),
        (gzip.compress(GOOD.encode(), mtime=0)[:30], "s.csv.gz", "cannot be read"),
        (b"not gzip", "s.csv.gz", "cannot be read"),
        (b'date,a\n2020-01-01,"1\n', "s.csv", "is not"),
    ],
)
def test_unreadable_files(write, content, name, what):
    assert what in first_line(write(content, name))
