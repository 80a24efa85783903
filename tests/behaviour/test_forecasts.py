"""Forecasts, and how sure they are, through the command line."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path

import numpy as np
import pandas as pd

from tests.behaviour.conftest import result

ETT = Path(__file__).parents[2] / "data" / "ett" / "ETTh1.csv"


def ran(exp, *words, code=0):
    done = exp("backend=cpu", *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def table(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def content(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def etth1(begin, end):
    return pd.read_csv(ETT, dtype=str).iloc[begin:end]


def test_scores_of_intervals_hang_on_the_command_alone_and_nothing_is_written_into_the_run(trained, exp):
    run = trained("forecast")
    before = content(run)
    found = []
    for number, levels in enumerate(("[0.8]", "[0.55,0.8,0.9,0.975]")):
        ran(exp, "task=eval", f"init_from={run}", f"task.intervals={levels}", "plots=false", f"output_dir=e{number}")
        found.append(result(exp.path(f"e{number}"))["metrics"])
    for name in ("crps", "wql", "width_80"):
        assert found[0][name] == found[1][name]
    etth1(9000, 9100).to_csv(exp.path("new.csv"), index=False)
    words = [f"init_from={run}", "task.intervals=[0.8,0.975]", f"task.input={exp.path('new.csv')}"]
    ran(exp, "task=predict", *words, "plots=false", "output_dir=new")
    assert result(exp.path("new"))["data"]["intervals"]["calibrated_on"] == "val of ETTh1.csv"
    rows = table(exp.path("new") / "forecasts" / "future.csv")
    for row in rows:
        ends = [float(row[f"OT{end}"]) for end in ("_lo97.5", "_lo80", "", "_hi80", "_hi97.5")]
        assert ends == sorted(ends)
    by_channel = {row["channel"]: row for row in table(exp.path("e1") / "metrics_intervals_per_channel.csv")}
    deviation = pd.read_csv(ETT)["OT"][:8640].std(ddof=0)
    width = np.mean([float(row["OT_hi80"]) - float(row["OT_lo80"]) for row in rows]) / deviation
    assert abs(width - float(by_channel["OT"]["width_80_standardised"])) < 1e-4
    assert content(run) == before
