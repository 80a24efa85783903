"""Ranks, means over seeds, and the tables of both: files, terminal, LaTeX and Markdown."""

from __future__ import annotations

import csv
import io
import json
import statistics

import numpy as np
from rich.console import Console

from exp.report.formats import as_latex, as_markdown, as_rich
from exp.report.groups import Mean, rankings
from exp.report.runs import find_runs
from exp.report.tables import results_tables, write_rows


def names(runs, over_seeds=True):
    return {metric: [group.names for group in each] for metric, each in rankings(runs, over_seeds).items()}


def printed(runs):
    file = io.StringIO()
    Console(file=file, width=100).print(*map(as_rich, results_tables(runs)))
    return file.getvalue().splitlines()


def written(runs, folder):
    """The rows of ``sweep.csv`` and of ``sweep.json``."""
    write_rows(runs, folder)
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file)), json.loads((folder / "sweep.json").read_text())


def test_the_best_come_first_and_those_without_a_metric_last(make_run, tmp_path):
    for number, metric in enumerate([0.3, None, 0.1, float("nan"), 0.1, float("inf"), 0.2]):
        make_run(str(number), metric, error="x" if metric is None else None)
    assert names(find_runs([tmp_path]), over_seeds=False) == {"mse": ["2", "4", "6", "0", "1", "3", "5"]}


def test_which_runs_belong_together(make_run, tmp_path):
    """What follows the seed, and what says nothing about the computation, does not tell runs apart; all else does."""

    def noise(seed, scale=2):
        return [{"type": "Noise", "seed": seed, "scale": scale}]

    for number, config in enumerate([
        {"seed": 1, "data.shuffle": 1, "record.follows": {"data.shuffle": "seed"}, "hooks": noise(1)},
        {"seed": 2, "data.shuffle": 2, "record.follows": {"data.shuffle": "seed"}, "hooks": noise(2), "plots": False},
        {"seed": 3, "data.shuffle": 7, "hooks": noise(1)},
        {"seed": 4, "data.shuffle": 7, "hooks": noise(1, scale=3)},
        {"seed": 5, "data.shuffle": 7, "hooks": noise(1), "nproc": 2},
    ]):  # fmt: skip
        make_run(str(number), metric=1.0 + number, config=config)
    (make_run("5", metric=0.1, config={"seed": 6}) / "config.yaml").write_text(": {")
    assert names(find_runs([tmp_path])) == {"mse": ["5", "0 1", "2", "3", "4"]}


def test_what_a_mean_is_taken_over(make_run, tmp_path):
    for place, outcome in {
        "1a": {"metric": 1.0}, "2a": {"metric": 2.0}, "3a": {"metric": 3.0}, "3a again": {"metric": 5.0},
        "4a": {"error": "loss is nan"}, "5a": {"status": "completed", "metric_name": "mse"},
        "1b": {"metric": 9.0, "metrics": {"mse": 9.0, "rmse": 3.0}}, "2b": {"metric": 9.0},
        "1c": {"error": "no data"}, "2c": {},
    }.items():  # fmt: skip
        make_run(place, config={"seed": int(place[0]), "name": place[1]}, **outcome)
    groups = rankings(find_runs([tmp_path]), over_seeds=True)
    (group, other), (failed,) = groups["mse"], groups[None]
    assert group.score == Mean(7 / 3, statistics.stdev([1.0, 2.0, 4.0])), "seed 3 counts once"
    assert (group.n_text, group.left_out) == ("3 of 5", "1 failed, 1 without a metric")
    assert other.mean("mse") == Mean(9.0, 0.0)
    assert other.mean("rmse") is None, "one of the two runs has none"
    assert (failed.score, failed.n_text, failed.left_out) == (None, "0 of 2", "1 failed, 1 unfinished")


def test_larger_means_come_first_where_larger_is_better(make_run, tmp_path):
    for number, (rate, seed) in enumerate([(1, 1), (1, 2), (2, 1), (2, 2)]):
        make_run(str(number), metric=[0.9, 0.1, 0.6, 0.7][number], greater_is_better=True,
                 config={"optim.lr": rate, "seed": seed})  # fmt: skip
    assert names(find_runs([tmp_path])) == {"mse": ["2 3", "0 1"]}, "0.9 is the best run, but not the best mean"


def test_a_row_for_each_run_the_best_first(make_sweep, tmp_path):
    rows, full = written(find_runs([make_sweep()]), tmp_path)
    assert [row["run"] for row in full] == [row["run"] for row in rows] == ["2", "3", "0", "4", "1", "5"]
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4", "5", ""]
    assert dict(rows[0]) == {
        "rank": "1", "run": "2", "optim.lr": "0.001", "seed": "1", "status": "completed", "selected_by": "0.41",
        "mse": "0.41", "mae": "0.205", "steps": "40", "wall_s": "12.3456", "samples_per_second": "1234.57", "error": "",
    }  # fmt: skip
    failed = {"mse": "", "mae": "", "error": "rank 0: RunError: loss is nan"}
    assert {key: rows[-1][key] for key in failed} == failed
    assert (full[-1]["mse"], full[-1]["metric_name"]) == (None, None)
    assert full[0]["samples_per_second"] == 1234.5678
    assert full[0]["folder"].endswith("sweep/2")


def test_runs_of_different_metrics_have_a_rank_each_and_no_two_columns_have_one_name(make_run, tmp_path):
    """Metrics and keys may be called as what stands beside them."""
    for name, metric, mse in (("a", "mse", 0.5), ("b", "error", 0.7)):
        make_run(name, mse, [f"metric={metric}"], {"metric": metric}, metric_name=metric, metrics={metric: mse})
    rows, full = written(find_runs([tmp_path]), tmp_path / "out")
    found = [[row[title] for title in ("rank", "mse", "metrics.error", "config.metric", "error")] for row in rows]
    assert found == [["1", "0.5", "", "mse", ""], ["1", "", "0.7", "error", ""]]
    assert [(row["metric"], row["config.metric"]) for row in full] == [(0.5, "mse"), (0.7, "error")]


def test_seeds_are_one_row_of_the_table_on_the_terminal(make_sweep):
    lines = [" ".join(line.split()) for line in printed(find_runs([make_sweep()]))]
    assert [lines[0], *lines[2:5]] == [
        "runs lr validation mse seconds",
        "* 2 3 0.001 0.4150 ± 0.0071 0.4150 ± 0.0071 (2) 12",
        "4 5 0.01 0.5100 0.5100 (1 of 2) 1 failed: rank 0: RunError: loss is nan",  # a single seed has no deviation
        "0 1 0.0001 0.5150 ± 0.0071 0.5150 ± 0.0071 (2) 12",
    ]
    assert any("sample standard deviation" in line for line in lines)


def test_names_are_no_markup(make_run, tmp_path):
    for number, name in enumerate(["[a_b]", "50% & $x^2$ \\ ~{}#", "a|b *c* <d>"]):
        for seed in (1, 2):
            metric = 1e-6 * (number + seed)
            make_run(f"{number}{seed}", metric=metric, metric_name="mse_x", metrics={"mse_x": metric},
                     config={"model.kind": name, "seed": seed})  # fmt: skip
    tables = results_tables(find_runs([tmp_path]), paper=True)
    latex = as_latex(tables)
    deviation = r"\pm 7.071 \times 10^{-7}$ (2) \\"
    assert latex[latex.index(r"\toprule") :].splitlines() == [
        r"\toprule",
        r"data & kind & mse\_x \\",
        r"\midrule",
        r"etth1 & 50\% \& \$x\textasciicircum{}2\$ \textbackslash{} \textasciitilde{}\{\}\# & $2.5 \times 10^{-6} "
        + deviation,
        r"etth1 & {[}a\_b] & $1.5 \times 10^{-6} " + deviation,  # behind the end of a row it would be its argument
        r"etth1 & a\textbar{}b {*}c{*} \textless{}d\textgreater{} & $3.5 \times 10^{-6} " + deviation,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    rows = as_markdown(tables).splitlines()
    assert [rows[0], rows[4]] == [
        r"| data | kind | mse\_x |",
        r"| etth1 | a\|b \*c\* \<d\> | 3.5e-06 ± 7.071e-07 (2) |",
    ]


def test_rows_of_a_paper_are_data_sets_and_what_differs_on_them(make_run, tmp_path):
    def table_with(place, experiment, data, horizon):
        overrides = [f"experiment={experiment}", f"data={data}", f"data.horizon={horizon}"]
        config = {"name": experiment, "data.horizon": horizon}
        make_run(place, metric=1.0, overrides=overrides, config=config)
        return results_tables(find_runs([tmp_path]), paper=True)[0]

    assert table_with("A96", "a", "A", 96).heads == ["data", "mse", "mae"], (
        "a paper says it also where all have the same"
    )
    for data, horizon in (("B", 1000), ("B", 96), ("A", 1000)):
        table = table_with(f"{data}{horizon}", "a", data, horizon)
    assert table.heads == ["data", "horizon", "mse", "mae"]
    assert [row[:2] for row in table.rows] == [["A", "96"], ["A", "1000"], ["B", "96"], ["B", "1000"]]
    assert table_with("other", "c", "A", 96).heads == ["data", "experiment", "horizon", "mse", "mae"]
    labels = [row[0] for row in table_with("again", "c", "A", 96).rows]
    assert {"again", "other"} < set(labels), "nothing else tells these two apart"


def test_what_is_better_than_noise_and_what_loses_to_a_baseline(make_run, tmp_path):
    """b is as good as a up to the noise of three seeds, c is worse, also than repeating the last value."""
    random = np.random.RandomState(0)
    for kind, values in {"a": (0.40, 0.41, 0.42), "b": (0.43, 0.41, 0.42), "c": (0.60, 0.61, 0.62)}.items():
        for seed, value in enumerate(values, 1):
            recorded = {
                "metrics": {"mse": value, "mae": value / 2, "mse_naive": 0.5},
                "baselines": {"mse_naive": "mse"},
                "metrics_alike": ["mse", "mae"],
            }
            config = {"model.kind": kind, "seed": seed}
            folder = make_run(kind + str(seed), value, overrides=[f"seed={seed}"], config=config, **recorded)
            samples = {"mse": value + random.randn(100) / 100, "mse_naive": np.full(100, 0.5)}
            np.savez(
                str(folder / "test_samples.npz"), **{name: array.astype("float32") for name, array in samples.items()}
            )
    runs = find_runs([tmp_path])
    (table,) = results_tables(runs)
    notes = [note for note in table.notes if note.startswith("kind=")]
    assert notes[0] == "kind=c: worse than mse_naive 0.5000, which needs no training"
    # differences -0.03, 0, 0: mean -0.01, and 4.303 standard errors of 0.01 beside it
    assert "kind=a against kind=b: -0.0100 (95% interval -0.0530 to 0.0330); " in notes[1]
    assert "no difference that three seeds show; about 23 more would" in notes[1]  # 26 in all, at an effect of 0.577
    assert "more than the noise of three seeds (p 0); more than the noise of 100 test samples (p 0.00" in notes[2]
    (paper,) = results_tables(runs, paper=True)
    assert paper.heads == ["data", "kind", "mse", "mae"], "a baseline is no column"
    assert paper.bold == [["mse", "mae"], ["mse", "mae"], []]
    assert "| **0.4100 ± 0.0100 (3)** | **0.2050 ± 0.0050 (3)** |" in as_markdown([paper])
    assert r"$\mathbf{0.4100 \pm 0.0100}$ (3)" in as_latex([paper])


def test_reference_metrics_are_beside_those_of_the_runs(make_run, tmp_path):
    reference = {"mse": 0.354, "mae": 0.39, "source": "Liu et al., <2024>"}
    for number, unlike in enumerate([[], ["data.lookback=96 (there: 720)"]]):
        make_run(str(number), metric=0.4, config={"data.lookback": number}, overrides=[f"data.lookback={number}"],
                 reference={**reference, "differs": unlike}, metric_units={"mse": "raw"})  # fmt: skip
    (table,) = results_tables(find_runs([tmp_path]), paper=True)
    assert table.rows == [
        ["etth1", "0", "0.4000", "0.354", "+0.0460", "0.2000", "0.39", "-0.1900"],
        ["etth1", "1", "0.4000", "", "", "0.2000", "", ""],
    ]
    for note in (
        "reference: Liu et al., <2024>", "mse: of raw values", "mse: smaller is better",
        "reference metrics are of another experiment, and not shown, where data.lookback=96 (there: 720)",
    ):  # fmt: skip
        assert note in table.notes
