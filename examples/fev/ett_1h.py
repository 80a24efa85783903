"""fev-bench's task ETT_1H (Shchur et al., arXiv 2509.26468) with TimeBridge's quantile heads, measured by fev itself.

    pip install fev
    python examples/fev/ett_1h.py ~/data/ETT-small outputs/ett_1h

ETTh1 and ETTh2, seven series each; the last 20 windows of 168 hours. Training and validation never see these windows:
they use the first 80 % of the rows, and the first window begins after 81 %. One model for each file, with the settings
published for it and nine quantile heads. Further arguments, such as ``seed=1``, are overrides of both trainings.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import fev
import pandas as pd

import exp

HORIZON, WINDOWS, SEASON = 168, 20, 24
SETS = ("ETTh1", "ETTh2")
LEVELS = [round(0.1 * number, 1) for number in range(1, 10)]
# The columns of the backtest's table for each quantile: quantiles are ends of intervals around the median.
COLUMNS = {0.5: "forecast", 0.1: "lo80", 0.2: "lo60", 0.3: "lo40", 0.4: "lo20", 0.6: "hi20", 0.7: "hi40", 0.8: "hi60",
           0.9: "hi80"}  # fmt: skip


def benchmark(data: Path, folder: Path) -> fev.Task:
    """The benchmark's task, with the files in ``data``."""
    tables = {name: pd.read_csv(data / f"{name}.csv", parse_dates=["date"]) for name in SETS}
    rows = [
        {"id": name, "timestamp": table["date"].tolist(), **{key: table[key].tolist() for key in table.columns[1:]}}
        for name, table in tables.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(folder / "ett_1h.parquet")
    return fev.Task(
        dataset_path=str(folder / "ett_1h.parquet"), horizon=HORIZON, num_windows=WINDOWS, seasonality=SEASON,
        eval_metric="SQL", extra_metrics=["MASE"], quantile_levels=LEVELS, target=list(tables["ETTh1"].columns[1:]),
    )  # fmt: skip


def forecasts_of(name: str, data: Path, folder: Path, overrides: list[str]) -> pd.DataFrame:
    """Train on the first rows of a file and forecast its windows; the table has a row per window, series and hour."""
    run = exp.run([
        f"experiment=timebridge_{name.lower()}", f"data.root={data}", "data.split=ratio", f"data.horizon={HORIZON}",
        "model/output=quantiles", f"model.output.levels={LEVELS}", f"output_dir={folder / name}", "resume=auto",
        *overrides,
    ])  # fmt: skip
    found = exp.run([
        "task=backtest", f"init_from={run.path}", f"task.windows={WINDOWS}", "task.intervals=[0.2,0.4,0.6,0.8]",
        f"output_dir={folder / name}_backtest", "overwrite=true",
    ])  # fmt: skip
    table = pd.read_parquet(found.path / "forecasts" / "backtest.parquet")
    return table[table["model"] == run.config.name]


def naive_of(past: list[float]) -> dict[str, list[float]]:
    """Repeat the last day; all quantiles are the same."""
    again = past[-SEASON:] * (HORIZON // SEASON)
    return dict.fromkeys(["predictions", *map(str, LEVELS)], again)


def main() -> None:
    """Print SQL and MASE of both models together, and of the seasonal naive forecast as a check of the protocol."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of ETTh1.csv and ETTh2.csv")
    parser.add_argument("folder", type=Path, help="where the runs go")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    data, folder = given.data.expanduser().resolve(), given.folder.expanduser().resolve()
    task = benchmark(data, folder)
    tables = {name: forecasts_of(name, data, folder, given.overrides) for name in SETS}
    windows: list[dict[str, Any]] = []
    naive: list[dict[str, Any]] = []
    for number, window in enumerate(task.iter_windows()):
        past, _ = window.get_input_data()
        naive.append({key: [naive_of(list(row[key])) for row in past] for key in task.target_columns})
        windows.append({key: [] for key in task.target_columns})
        for row in past:
            table = tables[row["id"]]
            origin = sorted(table["origin"].unique())[number]
            assert pd.Timestamp(origin) == pd.Timestamp(row["timestamp"][-1])
            for key, rows in table[table["origin"] == origin].groupby("series"):
                quantiles = {str(level): rows[column].tolist() for level, column in COLUMNS.items()}
                windows[-1][key].append({"predictions": quantiles["0.5"], **quantiles})
    for model, predictions in (("TimeBridge", windows), ("seasonal naive", naive)):
        summary = task.evaluation_summary(predictions, model_name=model)
        sys.stdout.write(f"{model:<16} SQL {summary['SQL']:.4f}  MASE {summary['MASE']:.10f}\n")


if __name__ == "__main__":
    main()
