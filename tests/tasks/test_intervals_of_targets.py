"""Intervals where only some series are forecast, and cells are empty."""

from __future__ import annotations

import csv

import pytest

from tests.conftest import TINY
from tests.docs.reader import ROOT

TARGETS = ["OT", "HUFL"]


@pytest.fixture
def holes(exp):
    """1,500 rows of ETTh1, of which every 37th cell is empty."""
    with (ROOT / "data" / "ett" / "ETTh1.csv").open(encoding="utf-8") as file:
        head, *rows = list(csv.reader(file))[:1501]
    cells = [[row[0], *("" if (7 * at + column) % 37 == 0 else cell for column, cell in enumerate(row[1:]))]
             for at, row in enumerate(rows)]  # fmt: skip
    with (exp.folder / "holes.csv").open("w", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *cells])
    own = ["data=csv", "data.name=holes", f"data.file={exp.folder / 'holes.csv'}", "data.channels=7"]
    return [*own, "data.missing=mask", f"data.targets=[{','.join(TARGETS)}]"]


@pytest.mark.slow
def test_they_are_of_what_is_forecast_alone(exp, holes):
    done = exp(*TINY, *holes, "data.horizon=24", "model.quantiles=[0.1,0.5,0.9]", "output_dir=run")
    assert done.returncode == 0, done.stderr
    asked = ["task.intervals=[0.8]", "plots=false"]
    for source in ("model", "residuals"):
        done = exp("init_from=run", "backend=cpu", "task=predict", *asked, f"task.intervals_from={source}",
                   f"output_dir=ahead_{source}")  # fmt: skip
        assert done.returncode == 0, done.stderr
        measured = exp.result(f"ahead_{source}")["metrics"]
        assert all(measured[name] > 0 for name in ("crps", "width_80", "wql"))
        with (exp.path(f"ahead_{source}") / "forecasts" / "future.csv").open(encoding="utf-8") as file:
            head, *rows = csv.reader(file)
        assert head == ["date", *(f"{name}{end}" for name in sorted(TARGETS) for end in ("", "_lo80", "_hi80"))]
        assert all(float(low) <= float(high) for _, _, low, high, *_ in rows)

        done = exp("init_from=run", "backend=cpu", "task=eval", *asked, f"task.intervals_from={source}",
                   "nproc=2", f"output_dir=measured_{source}")  # fmt: skip
        assert done.returncode == 0, done.stderr
        with (exp.path(f"measured_{source}") / "metrics_intervals_per_channel.csv").open(encoding="utf-8") as file:
            assert [row["channel"] for row in csv.DictReader(file)] == sorted(TARGETS)
        assert 0 < exp.result(f"measured_{source}")["metrics"]["coverage_80"] < 1
