from __future__ import annotations

import csv
import io
import json

from rich.console import Console

from exp.report.page_table import results_table
from exp.report.run import Run
from exp.report.runs import find_runs
from exp.report.table import write_table
from exp.report.terminal import as_rich_table


def printed(runs):
    file = io.StringIO()
    Console(file=file, width=200).print(as_rich_table(runs))
    return file.getvalue().splitlines()


def written(runs, folder):
    """The rows of ``sweep.csv`` and of ``sweep.json``."""
    write_table(runs, folder)
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file)), json.loads((folder / "sweep.json").read_text())


def test_a_row_for_each_run_the_best_first(make_sweep, tmp_path):
    rows, full = written(find_runs([make_sweep()]), tmp_path)
    assert [row["run"] for row in full] == [row["run"] for row in rows] == ["2", "3", "0", "4", "1", "5"]
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4", "5", ""]
    assert dict(rows[0]) == {
        "rank": "1", "run": "2", "optim.lr": "0.001", "seed": "1", "status": "completed", "selected_by": "0.41",
        "mse": "0.41", "mae": "0.205", "steps": "40", "wall_s": "12.3456", "samples_per_second": "1234.57", "error": "",
    }  # fmt: skip
    failed = {"mse": "nan", "mae": "nan", "error": "rank 0: RunError: loss is nan"}
    assert {key: rows[-1][key] for key in failed} == failed
    assert (full[-1]["mse"], full[-1]["metric_name"]) == (None, None)
    assert full[0]["samples_per_second"] == 1234.5678
    assert full[0]["folder"].endswith("sweep/2")


def test_runs_of_different_metrics_have_a_rank_each(make_run, tmp_path):
    make_run("a", metric=0.5, overrides=["steps=3"], config={"steps": 3})
    make_run("b", metric=0.7, metric_name="mIoU", overrides=["steps=4"], config={"steps": 4}, greater_is_better=True)
    rows, _ = written(find_runs([tmp_path]), tmp_path / "out")
    assert [(row["rank"], row["mse"], row["mIoU"], row["config.steps"], row["steps"]) for row in rows] == [
        ("1", "0.5", "nan", "3", "40"), ("1", "nan", "0.7", "4", "40"),
    ]  # fmt: skip


def test_a_metric_keeps_its_value_whatever_its_name_is(make_run, tmp_path):
    """Beside it stands what exp tells of the run: neither has the other's column."""
    metrics = {"error": 0.25, "steps": 7.5, "metric": 8.5, "wall_s": 9.5, "n": 10.5}
    for seed in (1, 2, 3):
        outcome = (
            {"error": "it is broken"} if seed == 3 else {"metric": 0.25, "metric_name": "error", "metrics": metrics}
        )
        config = {"seed": seed, "model.error": seed}
        make_run(f"r/{seed}", overrides=[f"{key}={seed}" for key in config], config=config, **outcome)
    runs = find_runs([tmp_path / "r"])
    rows, (first, _, failed) = written(runs, tmp_path)
    names = ["metrics.error", "metrics.steps", "metrics.metric", "metrics.wall_s", "n"]
    for row in rows[:2]:
        assert [float(row[name]) for name in names] == [first[name] for name in names] == list(metrics.values())
        assert (row["error"], row["steps"], row["wall_s"]) == ("", "40", "12.3456")
    assert (first["metric_name"], first["metric"], first["error"]) == ("error", 0.25, None)
    assert (failed["error"], failed["metrics.error"]) == ("rank 0: RunError: it is broken", None)
    head = results_table(runs, "error", {run: n for n, run in enumerate(runs)})
    assert ">error</button>" in head
    assert ">model.error</button>" in head


def test_seeds_are_one_row_of_the_terminal_s_table(make_sweep):
    lines = [" ".join(line.split()) for line in printed(find_runs([make_sweep()]))]
    assert [lines[0], *lines[2:5]] == [
        "runs lr validation mse n seconds",
        "* 2 3 0.001 0.4150 ± 0.0071 0.4150 ± 0.0071 2 12",
        "4 5 0.01 0.5100 0.5100 1 of 2 1 failed: rank 0: RunError: loss is nan",  # a single seed has no deviation
        "0 1 0.0001 0.5150 ± 0.0071 0.5150 ± 0.0071 2 12",
    ]
    assert "sample standard deviation" in lines[5]


def test_a_wide_sweep_still_fits_into_100_columns(make_run, tmp_path):
    for number in range(3):
        config = {f"model.a_rather_long_name_{key}": f"{'x' * 40}{number}" for key in range(9)}
        outcome = (
            {"error": "z" * 300} if number == 2 else {"metric": number + 1e-7, "metric_units": {"mse": "standard"}}
        )
        place = f"{'some/where/deep/' * 5}{number}_{'y' * 50}"
        make_run(place, overrides=[f"{key}={value}" for key, value in config.items()], config=config, **outcome)
    lines = printed(find_runs([tmp_path]))
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    for words in ("a_rather_long_name_0", "not shown", "a_rather_long_name_8", "mse: standard"):
        assert words in text


def some_runs(folder, completed: int, failed: int) -> list:
    results = [
        {"status": "completed", "metric_name": "mse", "metric": score, "wall_s": 1.0, "selected_by": {"value": score}}
        for score in (number * 7 % completed / 1000 for number in range(completed))
    ] + [{"status": "failed", "error": {"rank": None, "type": "RunError", "message": "broken"}}] * failed
    return [Run(folder / str(number), str(number), {"steps": number}, [f"steps={number}"], result)
            for number, result in enumerate(results)]  # fmt: skip


def test_of_many_runs_the_best_and_those_that_failed(tmp_path):
    runs = some_runs(tmp_path, completed=61, failed=12)
    lines = printed(runs)
    best = sorted(runs[:61], key=lambda run: run.metric)[:15]
    rows = [line.replace("*", "").split() for line in lines[2:27]]
    assert [row[0] for row in rows] == [run.name for run in [*best, *runs[61:71]]]
    assert "failed: RunError: broken" in lines[17]
    assert [line.strip() for line in lines[28:]] == ["46 more completed, 2 more failed", "all 73 runs: sweep.csv"]
    assert sum("*" in line for line in lines) == 1
    assert len(printed(some_runs(tmp_path, completed=36, failed=4))) == 2 + 40 + 1, "all of them"
