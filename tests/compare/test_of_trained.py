"""Runs that used the weights of another one stand in tables with what those weights were trained with."""

from __future__ import annotations

import pytest

from exp.compare.keys import column, differing
from exp.compare.paper import paper_tables
from exp.compare.runs import find_runs

CHOSEN = {"experiment": "timebridge_small", "model": "timebridge_small", "data": "csv", "schedule": "halving"}


@pytest.fixture
def runs(make_run, tmp_path):
    """Two trainings, an evaluation of each with the defaults of a training, and one whose training is gone."""
    own = ["data=csv", "data.name=plain"]
    linear = {"model": {"_target_": "exp.models.DLinear"}, "data.name": "plain"}
    first = make_run("a", 0.5, [*own, "model=dlinear", "max_epochs=2"], {
        **linear, "max_epochs": 2, "optim.lr": 0.01, "record": {"chosen": {**CHOSEN, "model": "dlinear"}},
    })  # fmt: skip
    second = make_run("b", 0.4, own, {"data.name": "plain", "record": {"chosen": CHOSEN}})
    other = {"schedule.param_scheduler": [], "task.name": "eval", "max_epochs": 10}
    for place, folder, more in (("c", first, linear), ("d", second, {}), ("e", tmp_path / "gone", {})):
        chosen = {**CHOSEN, "schedule": "constant", "model": "dlinear" if more else "timebridge_small"}
        record = {"chosen": chosen, "trained_in": str(folder)}
        make_run(place, 0.6, ["task=eval"], {"data.name": "plain", **more, **other, "record": record})
    return find_runs([tmp_path])


def test_an_evaluation_has_the_choices_of_the_run_that_it_evaluates(runs):
    pairs = runs[:4]
    assert column(pairs, "model") == ["dlinear", "timebridge_small"] * 2
    assert column(pairs, "schedule") == ["halving"] * 4
    assert column(pairs, "max_epochs") == [2, 4, 2, 4]
    assert column(pairs, "optim.lr") == [0.01, 0.001] * 2
    assert "schedule.param_scheduler" not in differing(pairs)
    assert column(runs[4:], "max_epochs") == column(runs[4:], "optim.lr") == [None]


def test_no_two_columns_of_a_paper_have_the_same_head(make_run, runs, tmp_path):
    make_run("f", 0.3, ["data=csv", "data.name=other"], {"data.name": "other", "record": {"chosen": CHOSEN}})
    runs = find_runs([tmp_path])
    (table,) = paper_tables(runs)
    assert len(set(table.keys)) == len(table.keys)
    assert table.keys.count("data") == 1
    assert {row.labels[table.keys.index("data")] for row in table.rows} == {"plain", "other"}
