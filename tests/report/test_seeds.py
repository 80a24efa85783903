"""Means over seeds: which runs belong together, what is told of the others, and the tables that papers print."""

from __future__ import annotations

import statistics

from exp.report.paper import paper_tables
from exp.report.paper_formats import as_latex, as_markdown, heads_of
from exp.report.runs import find_runs
from exp.report.seeds import Mean, groups_by_metric, mean_text


def names(runs):
    return {metric: [group.names for group in groups] for metric, groups in groups_by_metric(runs).items()}


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
    groups = groups_by_metric(find_runs([tmp_path]))
    (group, other), (failed,) = groups["mse"], groups[None]
    assert group.score == Mean(7 / 3, statistics.stdev([1.0, 2.0, 4.0]), 3), "seed 3 counts once"
    assert (group.n_text, group.left_out) == ("3 of 5", "1 failed, 1 without a metric")
    assert other.mean("mse") == Mean(9.0, 0.0, 2)
    assert other.mean("rmse") is None, "one of the two runs has none"
    assert (failed.score, failed.n_text, failed.left_out) == (None, "0 of 2", "1 failed, 1 unfinished")


def test_larger_means_come_first_where_larger_is_better(make_run, tmp_path):
    for number, (rate, seed) in enumerate([(1, 1), (1, 2), (2, 1), (2, 2)]):
        make_run(str(number), metric=[0.9, 0.1, 0.6, 0.7][number], greater_is_better=True,
                 config={"optim.lr": rate, "seed": seed})  # fmt: skip
    assert names(find_runs([tmp_path])) == {"mse": ["2 3", "0 1"]}, "0.9 is the best run, but not the best mean"


def test_a_mean_as_people_read_it():
    for mean, text in {
        Mean(0.35412, 0.0011, 3): "0.3541 ± 0.0011", Mean(0.35412, 0.00001, 3): "0.3541 ± 0.0000",
        Mean(0.35412, None, 1): "0.3541", Mean(123456.7, 1.25, 2): "1.235e+05 ± 1.25", None: "-",
    }.items():  # fmt: skip
        assert mean_text(mean) == text


def test_names_are_no_markup(make_run, tmp_path):
    for number, name in enumerate(["[a_b]", "50% & $x^2$ \\ ~{}#", "a|b *c* <d>"]):
        for seed in (1, 2):
            make_run(f"{number}{seed}", metric=1e-6 * (number + seed), metric_name="mse_x",
                     config={"model.kind": name, "seed": seed, "data.name": None})  # fmt: skip
    tables = paper_tables(find_runs([tmp_path]))
    latex = as_latex(tables)
    deviation = r"\pm 7.071 \times 10^{-7}$ (2) \\"
    assert latex[latex.index(r"\toprule") :].splitlines() == [
        r"\toprule",
        r"kind & mse\_x \\",
        r"\midrule",
        r"50\% \& \$x\textasciicircum{}2\$ \textbackslash{} \textasciitilde{}\{\}\# & $2.5 \times 10^{-6} " + deviation,
        r"{[}a\_b] & $1.5 \times 10^{-6} " + deviation,  # behind the end of a row it would be its argument
        r"a\textbar{}b {*}c{*} \textless{}d\textgreater{} & $3.5 \times 10^{-6} " + deviation,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    rows = as_markdown(tables).splitlines()
    assert [rows[0], rows[4]] == [r"| kind | mse\_x |", r"| a\|b \*c\* \<d\> | 3.5e-06 ± 7.071e-07 (2) |"]


def test_rows_are_data_sets_and_what_differs_on_them(make_run, tmp_path):
    def table_with(place, experiment, data, horizon):
        overrides = [f"experiment={experiment}", f"data.horizon={horizon}"]
        config = {"name": experiment, "data.name": data, "data.horizon": horizon}
        make_run(place, metric=1.0, overrides=overrides, config=config)
        return paper_tables(find_runs([tmp_path]))[0]

    for data, horizon in (("B", 1000), ("B", 96), ("A", 1000), ("A", 96)):
        table = table_with(f"{data}{horizon}", data.lower(), data, horizon)
    assert heads_of(table) == ["data", "horizon", "mse"], "each experiment has its own data, which stand for it"
    assert [row.labels for row in table.rows] == [["A", "96"], ["A", "1000"], ["B", "96"], ["B", "1000"]]
    assert [table.begins_block(number) for number in range(4)] == [False, False, True, False]
    assert as_latex([table]).count(r"\midrule") == 2
    assert heads_of(table_with("other", "c", "A", 96)) == ["data", "experiment", "horizon", "mse"]
    labels = [row.labels[0] for row in table_with("again", "c", "A", 96).rows]
    assert {"again", "other"} < set(labels), "nothing else tells these two apart"
