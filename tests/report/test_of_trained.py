"""Runs that used the weights of another one stand in tables with what those weights were trained with."""

from __future__ import annotations

import pytest

from exp.report.keys import column, differing
from exp.report.paper import paper_tables
from exp.report.runs import find_runs

CHOSEN = {"experiment": "timebridge_small", "model": "timebridge_small", "data": "csv", "schedule": "halving"}


@pytest.fixture
def runs(make_run, tmp_path):
    """Two trainings, an evaluation of each with the defaults of a training, and one whose training is gone."""
    linear = {"data.name": "plain", "model": {"_target_": "exp.models.DLinear"}}
    for place, chosen, config in (
        ("a", {**CHOSEN, "model": "dlinear"}, {**linear, "max_epochs": 2, "optim.lr": 0.01}),
        ("b", CHOSEN, {"data.name": "plain"}),
    ):
        overrides = ["data=csv", "data.name=plain", f"model={chosen['model']}"]
        make_run(place, 0.5, overrides, {**config, "record": {"chosen": chosen}})
    other = {"data.name": "plain", "schedule.param_scheduler": [], "task.name": "eval", "max_epochs": 10}
    for place, trained, more in (("c", "a", linear), ("d", "b", {}), ("e", "gone", {})):
        chosen = {**CHOSEN, "schedule": "constant", "model": "dlinear" if more else "timebridge_small"}
        record = {"chosen": chosen, "trained_in": str(tmp_path / trained)}
        make_run(place, 0.6, ["task=eval"], {**more, **other, "record": record})
    return find_runs([tmp_path])


def test_an_evaluation_has_the_choices_of_the_run_that_it_evaluates(runs):
    trained = {"model": ["dlinear", "timebridge_small"], "schedule": ["halving"] * 2, "max_epochs": [2, 4],
               "optim.lr": [0.01, 0.001]}  # fmt: skip
    assert {key: column(runs[:4], key) for key in trained} == {key: values * 2 for key, values in trained.items()}
    assert "schedule.param_scheduler" not in differing(runs[:4])
    assert column(runs[4:], "max_epochs") == column(runs[4:], "optim.lr") == [None]


def test_no_two_columns_of_a_paper_have_the_same_head(make_run, runs, tmp_path):
    make_run("f", 0.3, ["data=csv", "data.name=other"], {"data.name": "other", "record": {"chosen": CHOSEN}})
    (table,) = paper_tables(find_runs([tmp_path]))
    assert len(set(table.keys)) == len(table.keys)
    assert {row.labels[table.keys.index("data")] for row in table.rows} == {"plain", "other"}
