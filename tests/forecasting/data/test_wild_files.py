"""Files as people have them: read right, or refused with the file, the row, the column and what to do."""

from __future__ import annotations

import gzip
import os
from datetime import datetime, timedelta

import numpy as np
import pytest

from exp.errors import DataError
from exp.forecasting.config import ForecastingDataConfig
from exp.forecasting.data.dataset import ForecastingData
from exp.forecasting.data.preflight import preflight
from exp.forecasting.data.roles import Roles
from exp.forecasting.data.series import read_series


@pytest.fixture
def write(tmp_path):
    def write(content, name="s.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def hourly(form, count=400, begin=datetime(2019, 12, 1)):
    return [(begin + timedelta(hours=hour)).strftime(form) for hour in range(count)]


def file_of(dates, name="date"):
    return "\n".join([f"{name},a", *(f"{date},{number % 7}" for number, date in enumerate(dates))]) + "\n"


def refusal(path, **options):
    with pytest.raises(DataError) as error:
        read_series(path, **options)
    line = str(error.value).splitlines()[0]
    assert str(path) in line
    return line


@pytest.mark.parametrize(
    "form",
    [
        "%d/%m/%Y %H:%M",
        "%m/%d/%Y %H:%M:%S",
        "%d.%m.%Y %H:%M",
        "%d-%m-%y %H:%M",
        "%m/%d/%Y %I:%M %p",
        "%d-%b-%Y %H:%M",
        "%Y-%m-%dT%H:%M:%S",
        "%Y-%m-%dT%H:%M:%SZ",
        "%Y-%m-%d %H:%M:%S.%f+01:00",
        "%Y/%m/%d %H",
        "%Y%m%d%H",
        "%Y%m%d%H%M",
        "%Y%m%d %H:%M",
    ],
)
def test_the_form_of_dates_is_that_of_the_whole_column(write, form):
    # The first twelve days of December can be read with the month first; the later ones cannot.
    path = write(file_of(hourly(form, 40 * 24)))
    options = {"date_format": form} if "%y" in form else {}
    dates = read_series(path, **options).dates
    assert [date.replace(tzinfo=None) for date in dates.to_pydatetime()] == [
        datetime(2019, 12, 1) + timedelta(hours=hour) for hour in range(40 * 24)
    ]


@pytest.mark.parametrize(("form", "formats"), [("%d/%m/%Y %H:%M", ["%d/%m/%Y %H:%M", "%m/%d/%Y %H:%M"]),
                                               ("%d.%m.%y", ["%d.%m.%y", "%m.%d.%y", "%y.%m.%d"])])  # fmt: skip
def test_dates_that_can_be_read_in_two_ways_are_refused(write, form, formats):
    begin = datetime(2012, 12, 1)
    days = [(begin + timedelta(days=day)).strftime(form) for day in range(12)]
    path = write(file_of(days))
    line = refusal(path)
    assert "row 2, column date: '01" in line
    assert all(each in line for each in formats[:2])
    assert "data.date_format=" in line
    assert read_series(path, date_format=form).dates[11].to_pydatetime() == begin + timedelta(days=11)


def test_the_same_day_and_month_throughout_is_not_ambiguous(write):
    assert read_series(write(file_of(hourly("%d/%m/%Y %H:%M", 24, datetime(2020, 3, 3))))).dates[0].month == 3


def test_compact_dates_below_a_header_with_blanks_are_no_nanoseconds(write):
    series = read_series(write("a, Date ,b c \n1,20240101,2\n3,20240102,4\n"))
    assert [str(date)[:10] for date in series.dates] == ["2024-01-01", "2024-01-02"]
    assert series.names == ("a", "b c")
    assert series.values.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("factor", [1, 1_000, 1_000_000, 1_000_000_000])
def test_time_since_1970(write, factor):
    rows = [(1_577_836_800 + 3600 * hour) * factor for hour in range(5)]
    dates = read_series(write(file_of(rows))).dates
    assert [str(date) for date in dates[[0, 4]]] == ["2020-01-01 00:00:00", "2020-01-01 04:00:00"]
    # The row that departs is named, not the first.
    assert "row 4, column date: '7'" in refusal(write(file_of([*rows[:2], 7, *rows[3:]])))


def test_early_seconds_with_a_format(write):
    assert str(read_series(write(file_of([3600, 7200])), date_format="%s").dates[1]) == "1970-01-01 02:00:00"


def test_the_row_with_another_offset_is_named(write):
    dates = [*hourly("%Y-%m-%d %H:%M:%S+01:00", 10), *hourly("%Y-%m-%d %H:%M:%S+02:00", 12)[11:]]
    line = refusal(write(file_of(dates)))
    assert "row 12, column date: '2019-12-01 11:00:00+02:00' has another offset from UTC" in line
    assert "(+01:00)" in line


@pytest.mark.parametrize("odd", ["2019-12-01 02:00", "01/12/2019 02:00:00", "2019-12-01", "20191201", "noon", "NA"])
def test_the_row_in_another_form_is_named(write, odd):
    dates = hourly("%Y-%m-%d %H:%M:%S", 5)
    dates[2] = odd
    assert "row 4, column date" in refusal(write(file_of(dates)))


def test_a_format_that_does_not_fit(write):
    path = write(file_of(["01/02/2020", "31/12/2020", "2021-01-01"]))
    assert "row 4, column date: '2021-01-01' does not fit data.date_format=%d/%m/%Y" in refusal(
        path, date_format="%d/%m/%Y"
    )
    assert "%Q" in refusal(path, date_format="%Q")


def test_another_name_of_the_column_of_dates(write):
    path = write(file_of(hourly("%Y-%m-%d %H:%M"), "time stamp"))
    assert "set data.date_column='\"time stamp\"'" in refusal(path)
    assert read_series(path, date_column="Time Stamp").names == ("a",)
    numbers = write("a,b\n1,2\n3,4\n", "n.csv")
    assert "or data.date_column=null where there is none" in refusal(numbers)
    series = read_series(numbers, date_column=None)
    assert series.names == ("a", "b")
    assert series.dates is None


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("date,a,b,\n2020-01-01,1,2,\n", "row 1, column 4: the column has no name (the line ends with a comma)"),
        ("date,a,b\n2020-01-01,1,2,\n", "the row has 4 cells, but the first row has 3; remove the comma at the end"),
        (",date,a\n0,2020-01-01,1\n", "row 1, column 1: the column has no name (of row numbers, perhaps)"),
        ("Unnamed: 0,date,a\n0,2020-01-01,1\n", "row 1, column 1: the column has no name"),
        ("date,a, a\n2020-01-01,1,2\n", "row 1, column 3: 'a' is the name of column 2, too"),
        ("date;a;b\n2020-01-01;1,5;2\n", "row 1: its cells are separated by semicolons"),
        ("date;p (mbar, abs);b\n", "row 1: its cells are separated by semicolons"),
        ("date\ta\n2020-01-01\t1\n", "row 1: its cells are separated by tabs"),
        ('date,a\n2020-01-01,"1,5"\n', "row 2, column a: '1,5' is not a finite number"),
        ('date,a\n2020-01-01,"1,234.5"\n', "row 2, column a: '1,234.5' is not a finite number"),
        ("date,a\n2020-01-01,NA\n", "row 2, column a: 'NA' is not a finite number"),
        ("date,place,a\n2020-01-01,Bonn,1\n2020-01-02,Bonn,2\n", "in the whole column: remove it if it is no series"),
        ("2020-01-01,1,2\n2020-01-02,3,4\n", "which looks like data; put the names of the columns above it"),
    ],
)
def test_a_layout_that_is_not_ours_is_named(write, text, where):
    assert where in refusal(write(text))


@pytest.mark.parametrize("quoted", ['"5\n', '"5"x\n'])
def test_a_quote_is_blamed_where_it_opens(write, quoted):
    rows = [f"2020-01-01 {hour:02d}:00:00,{hour}\n" for hour in range(24)]
    rows[4] = f"2020-01-01 04:00:00,{quoted}"
    for closed in (False, True):  # by another stray one, further down
        if closed:
            rows[20] = '2020-01-01 20:00:00,"20\n'
        assert "row 6" in refusal(write("date,a\n" + "".join(rows)))


def test_a_quote_that_opens_in_the_last_line(write):
    assert "row 3: a quote opens here" in refusal(write('date,a\n2020-01-01,1\n2020-01-02,"2'))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("date,a\n2020-01-01,1\n".encode("utf-16"), "it is UTF-16"),
        (b"PAR1\x15\4\x15", "it is Parquet"),
        (b"PK\3\4\x14\0", "it is a zip archive or a workbook"),
        ("date,a\n2020-01-01,1\n".encode("utf-16-le"), "row 1 holds NUL bytes"),
        ("date,Temp\u00e9rature\n".encode("latin-1"), "row 1 is not UTF-8 text"),
        ("date,a\n2020-01-01,1\n2020-01-02,2\u00b0\n".encode("latin-1"), "row 3 is not UTF-8 text"),
        (gzip.compress(b"date,a\n2020-01-01,1\n", mtime=0), "it is compressed by gzip; let its name end in .gz"),
    ],
)
def test_another_encoding_is_named(write, content, what):
    assert what.split("row")[0] in (line := refusal(write(content)))
    # On Python 3.8 the csv module refuses NUL bytes before we see them.
    assert what in line or "NUL" in line


@pytest.mark.parametrize(
    ("cell", "why"), [("1e300", "beyond what float32 carries"), ("-4e38", "beyond"), ("1e-300", "nearer to zero")]
)
def test_numbers_that_float32_cannot_carry(write, cell, why):
    path = write(f"date,a,b\n2020-01-01,1,2\n2020-01-02,3,{cell}\n")
    assert f"row 3, column b: {cell!r} is {why}" in refusal(path)
    path = write(f"1,2\n3,{cell}\n", "n.csv")
    assert f"row 2, column 2: {cell!r}" in refusal(path, header=False)


def data_of(path, **options):
    return ForecastingData("own", str(path), 1, lookback=8, horizon=2, **options)


def test_statistics_that_float32_cannot_carry(write):
    small = write(file_of(hourly("%Y-%m-%d %H:%M")).replace(",", ",1.2").replace("date,1.2a", "date,a"))
    data_of(small)  # 1.20, 1.21, ...
    rows = [f"{date},{1.2 + number % 7 / 10}e-38" for number, date in enumerate(hourly("%Y-%m-%d %H:%M"))]
    with pytest.raises(DataError, match=r"tiny.csv, column a: .* beyond what float32 carries"):
        data_of(write("\n".join(["date,a", *rows]), "tiny.csv"))
    rows[350] = f"{hourly('%Y-%m-%d %H:%M')[350]},3e38"
    rows[:350] = [f"{date},{number % 7}e-5" for number, date in enumerate(hourly("%Y-%m-%d %H:%M", 350))]
    with pytest.raises(DataError, match=r"row 352, column a: '3e38' is .* standard deviations"):
        data_of(write("\n".join(["date,a", *rows]), "far.csv"))


def test_gaps_are_told_once_and_can_be_refused(write):
    dates = hourly("%Y-%m-%d %H:%M:%S", 403)
    del dates[100:102], dates[300]
    path = write(file_of(dates))
    data = data_of(path)
    (note,) = data.notes
    assert "row 102, column date: '2019-12-05 06:00:00' is 3:00:00 after the date before it" in note
    assert "most rows are 1:00:00 apart (2 of 399 steps depart from that)" in note
    record = data.record(lambda value: [value])
    assert (record["time_step"], record["irregular_steps"], record["notes"]) == ("1:00:00", 2, data.notes)
    with pytest.raises(DataError, match=r"row 102, column date.*data.allow_gaps=true"):
        data_of(path, allow_gaps=False)


def test_an_even_calendar_has_no_gaps(write):
    months = [f"{2000 + month // 12}-{month % 12 + 1:02d}-01" for month in range(120)]
    weekdays = [str(datetime(2020, 1, 1) + timedelta(days=day))[:10] for day in range(200)
                if (datetime(2020, 1, 1) + timedelta(days=day)).weekday() < 5]  # fmt: skip
    for dates, step in ((months, "MS"), (weekdays, "B")):
        data = data_of(write(file_of(dates)), allow_gaps=False)
        assert data.record(lambda value: [value])["irregular_steps"] == 0
        assert data.rhythm.step == step
    del months[50]
    assert data_of(write(file_of(months))).rhythm == ("1 month", 1, 50)


def test_published_files_are_regular():
    data = ForecastingData("ETTh1", "ETTh1.csv", 7, split="ett_hour", allow_gaps=False)
    assert data.notes == []


def config(**changes):
    return vars(ForecastingDataConfig(name="own", channels=1, **changes))


def preflight_refusal(**changes):
    with pytest.raises(DataError) as error:
        preflight(config(**changes))
    return str(error.value).splitlines()[0]


def test_what_is_no_file_is_said_to_be_so(tmp_path, monkeypatch):
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "link.csv").symlink_to(tmp_path / "gone.csv")
    os.mkfifo(tmp_path / "pipe.csv")
    root = str(tmp_path)
    assert f"{root}/folder.csv is a folder; name a file in it" in preflight_refusal(root=root, file="folder.csv")
    assert f"is a link to {tmp_path / 'gone.csv'}, which is not there" in preflight_refusal(root=root, file="link.csv")
    assert "is no regular file" in preflight_refusal(root=root, file="pipe.csv")
    assert "there is no such file" in preflight_refusal(file=f"{root}/no.csv")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "x.csv").touch()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(DataError, match=f"in the current folder there is one: data.file={tmp_path}/here/x.csv"):
        preflight(config(root=root, file="x.csv"))


def test_preflight_takes_the_keys_of_dates(write):
    path = write("when,a\n")
    preflight(config(file=str(path), date_column="When", date_format="%d/%m/%Y"))
    assert "data.date_format=dd/mm/yyyy has no directive" in preflight_refusal(
        file=str(path), date_column="when", date_format="dd/mm/yyyy"
    )


@pytest.mark.parametrize("header", [True, False])
def test_an_empty_cell_of_a_single_series_is_a_row(tmp_path, header):
    rows = [str(number / 4) for number in range(200)]
    rows[50], rows[60], rows[70] = "", '""', "  "
    path = tmp_path / "one.csv"
    path.write_text("\n".join(["load"] * header + rows) + "\n\n\n \n")
    data = {"header": header, "date_column": None}
    with pytest.raises(DataError, match=rf"row {51 + header}, column .*: '' is not a finite number"):
        read_series(path, **data)
    series = read_series(path, **data, roles=Roles(masks=True))
    assert len(series.values) == 200
    assert np.isnan(series.values[:, 0]).nonzero()[0].tolist() == [50, 60, 70]
    assert series.values[199, 0] == 199 / 4
    rows[50], rows[70], rows[80] = "1", "2", "x"
    path.write_text("\n".join(["load"] * header + rows))
    with pytest.raises(DataError, match=rf"row {61 + header}, column .*: ''"):
        read_series(path, **data)
    with pytest.raises(DataError, match=rf"row {81 + header}, column .*: 'x' is not a finite number, nor is the cell"):
        read_series(path, **data, roles=Roles(masks=True))


def test_blank_lines_of_several_series_are_no_rows(tmp_path):
    path = tmp_path / "two.csv"
    path.write_text("\na,b\n\n1,2\n \n3,4\nx,5\n\n")
    with pytest.raises(DataError, match="row 7, column a: 'x'"):
        read_series(path, date_column=None)
    path.write_text("\n\n1\n2\n")
    masked = Roles(masks=True)
    assert np.isnan(read_series(path, header=False, date_column=None, roles=masked).values[:, 0]).tolist() == [
        True, True, False, False,
    ]  # fmt: skip


def test_what_counts_as_empty(tmp_path):
    path = tmp_path / "two.csv"
    path.write_text("a,b\n1,2\n , NAN \nnan,3\n4,NaN\n")
    values = read_series(path, date_column=None, roles=Roles(masks=True)).values
    assert np.isnan(values).tolist() == [[False, False], [True, True], [True, False], [False, True]]
    for cell in ("-", "?", "inf", "-inf"):
        path.write_text(f"a,b\n1,2\n{cell},3\n")
        with pytest.raises(DataError) as caught:
            read_series(path, date_column=None, roles=Roles(masks=True))
        assert f"row 3, column a: '{cell}'" in str(caught.value)
        assert "data.missing" not in str(caught.value)
