from __future__ import annotations

import csv
import io
import json
import math

from rich.console import Console

from exp.compare.page_table import results_table
from exp.compare.runs import find_runs
from exp.compare.table import write_table
from exp.compare.terminal import as_rich_table


def printed(runs, **options):
    file = io.StringIO()
    console = Console(file=file, width=200)
    console.print(as_rich_table(runs, **options))
    return file.getvalue().splitlines()


def test_a_row_for_each_run_the_best_first(make_sweep, tmp_path):
    write_table(find_runs([make_sweep()]), tmp_path)
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert list(rows[0]) == [
        "rank", "run", "optim.lr", "seed", "status", "selected_by", "mse", "mae", "steps", "wall_s",
        "samples_per_second", "error",
    ]  # fmt: skip
    assert [row["run"] for row in rows] == ["2", "3", "0", "4", "1", "5"]
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4", "5", ""]
    assert rows[0]["optim.lr"] == "0.001"
    assert rows[0]["samples_per_second"] == "1234.57"
    assert rows[-1]["error"] == "rank 0: RunError: loss is nan"
    assert math.isnan(float(rows[-1]["mse"]))
    assert math.isnan(float(rows[-1]["mae"]))
    full = json.loads((tmp_path / "sweep.json").read_text())
    assert [row["run"] for row in full] == [row["run"] for row in rows]
    assert full[0]["samples_per_second"] == 1234.5678
    assert full[0]["folder"].endswith("sweep/2")
    assert full[-1]["mse"] is None
    assert full[-1]["metric_name"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep", "sweep.csv", "sweep.json", "sweep_seeds.csv"]


def test_runs_of_different_metrics_have_a_rank_each(make_run, tmp_path):
    make_run("a", metric=0.5, overrides=["steps=3"], config={"steps": 3})
    make_run("b", metric=0.7, metric_name="mIoU", overrides=["steps=4"], config={"steps": 4}, greater_is_better=True)
    write_table(find_runs([tmp_path]), tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out" / "sweep.csv").open()))
    assert [(row["rank"], row["mse"], row["mIoU"]) for row in rows] == [("1", "0.5", "nan"), ("1", "nan", "0.7")]
    assert [(row["config.steps"], row["steps"]) for row in rows] == [("3", "40"), ("4", "40")]


def test_a_metric_keeps_its_value_whatever_its_name_is(make_run, tmp_path):
    """Beside it stands what exp tells of the run: neither has the other's column."""
    metrics = {"error": 0.25, "steps": 7.5, "metric": 8.5, "wall_s": 9.5, "n": 10.5}
    for seed in (1, 2):
        config = {"seed": seed, "model.error": seed}
        overrides = [f"seed={seed}", f"model.error={seed}"]
        make_run(f"r/{seed}", 0.25, overrides, config, metric_name="error", metrics=metrics)
    make_run("r/3", error="it is broken", overrides=["seed=3", "model.error=3"], config={"seed": 3, "model.error": 3})
    runs = find_runs([tmp_path / "r"])
    write_table(runs, tmp_path)
    names = ["metrics.error", "metrics.steps", "metrics.metric", "metrics.wall_s", "n"]
    with (tmp_path / "sweep.csv").open(newline="") as file:
        for row in list(csv.DictReader(file))[:2]:
            assert [float(row[name]) for name in names] == list(metrics.values())
            assert (row["error"], row["steps"], row["wall_s"]) == ("", "40", "12.3456")
    first, _, failed = json.loads((tmp_path / "sweep.json").read_text())
    assert [first[name] for name in names] == list(metrics.values())
    assert (first["metric_name"], first["metric"], first["error"]) == ("error", 0.25, None)
    assert failed["error"] == "rank 0: RunError: it is broken"
    assert failed["metrics.error"] is None
    head = results_table(runs, "error", {run: n for n, run in enumerate(runs)})
    assert ">error</button>" in head
    assert ">model.error</button>" in head


def test_seeds_are_one_row_of_the_terminal_s_table(make_sweep):
    lines = printed(find_runs([make_sweep()]))
    assert lines[0].split() == ["runs", "lr", "validation", "mse", "n", "seconds"]
    assert lines[2].split() == ["*", "2", "3", "0.001", *["0.4150", "±", "0.0071"] * 2, "2", "12"]
    failed = "4 5 0.01 0.5100 0.5100 1 of 2 1 failed: rank 0: RunError: loss is nan"
    assert lines[3].split() == failed.split(), "a single seed has no deviation"
    assert lines[4].split() == ["0", "1", "0.0001", *["0.5150", "±", "0.0071"] * 2, "2", "12"]
    assert "sample standard deviation" in lines[5]


def test_a_wide_sweep_still_fits_into_100_columns(make_run, tmp_path):
    for number in range(3):
        config = {f"model.a_rather_long_name_{key}": f"{'x' * 40}{number}" for key in range(9)}
        overrides = [f"{key}={value}" for key, value in config.items()]
        place = f"{'some/where/deep/' * 5}{number}_{'y' * 50}"
        outcome = {"error": "z" * 300} if number == 2 else {"metric": 1e-7 + number}
        make_run(place, overrides=overrides, config=config, **outcome)
    lines = printed(find_runs([tmp_path]))
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    assert "a_rather_long_name_0" in text
    assert "not shown" in text
    assert "a_rather_long_name_8" in text


def test_the_values_that_a_metric_is_of_are_told(make_run, tmp_path):
    for number in range(2):
        make_run(str(number), metric=0.5 + number, metric_units={"mse": "standardised"})
    runs = find_runs([tmp_path])
    assert "mse: standardised" in "\n".join(printed(runs))
    assert "mse (standardised)" in results_table(runs, "mse", {run: n for n, run in enumerate(runs)})


def some_runs(tmp_path, completed: int, failed: int) -> list:
    from exp.compare.run import Run

    runs = []
    for number in range(completed + failed):
        score = (number * 7 % completed) / 1000
        result = {"status": "completed", "metric_name": "mse", "metric": score, "wall_s": 1.0,
                  "selected_by": {"value": score}}  # fmt: skip
        if number >= completed:
            result = {"status": "failed", "error": {"rank": None, "type": "RunError", "message": f"of {number}"}}
        place = tmp_path / str(number)
        runs.append(Run(place, str(number), {"steps": number, "output_dir": str(place)}, [f"steps={number}"], result))
    return runs


def test_of_many_runs_the_best_and_those_that_failed(tmp_path):
    runs = some_runs(tmp_path, completed=61, failed=12)
    lines = printed(runs)
    best = sorted(runs[:61], key=lambda run: run.metric)[:15]
    rows = [line.replace("*", "").split() for line in lines[2:]]
    assert [row[0] for row in rows[:15]] == [run.name for run in best]
    assert [row[0] for row in rows[15:25]] == [run.name for run in runs[61:71]]
    assert "failed: RunError: of 61" in lines[17]
    assert [line.strip() for line in lines[28:]] == ["46 more completed, 2 more failed", "all 73 runs: sweep.csv"]
    assert sum("*" in line for line in lines) == 1
    few = printed(some_runs(tmp_path, completed=36, failed=4))
    assert len(few) == 2 + 40 + 1, "all of them"
