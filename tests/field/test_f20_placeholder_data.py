"""F20: a data set that was not found led to placeholder data, and to a training run that meant nothing.

With exp a missing or malformed data set is an error, before anything starts: what was looked for, where, and the layout
that is expected. There is nothing to reproduce: the placeholder was in the users' own script.
"""

from __future__ import annotations

import pytest

from tests.conftest import TINY

pytestmark = pytest.mark.slow  # nothing in it depends on the version of torch


def test_a_missing_data_set_is_an_error_that_says_where(exp):
    (exp.folder / "data").mkdir()
    (exp.folder / "data" / "notes.txt").write_text("no series here\n")
    done = exp(*TINY, f"data.root={exp.folder / 'data'}")
    assert done.returncode == 2
    first, *details = done.stderr.splitlines()
    assert "ETTh1.csv" in first
    assert str(exp.folder / "data") in done.stderr
    assert any(line.strip().startswith("expected:") for line in details)
    assert not exp.path("outputs").exists()


def test_a_malformed_one_names_file_and_line(exp):
    (exp.folder / "data").mkdir()
    rows = ["date,a,b", "2020-01-01 00:00:00,1.0,2.0", "2020-01-01 01:00:00,1.0,oops"]
    (exp.folder / "data" / "mine.csv").write_text("\n".join(rows) + "\n")
    done = exp(*TINY, "data=csv", f"data.root={exp.folder / 'data'}", "data.file=mine.csv", "data.channels=2",
               "data.name=mine")  # fmt: skip
    assert done.returncode == 2
    assert "mine.csv" in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr
