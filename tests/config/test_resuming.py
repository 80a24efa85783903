"""Which changes of a configuration a continued training takes, and which it refuses."""

from __future__ import annotations

import copy

import pytest

from exp.config.resuming import Change, Changes, changes, refusal

OLD = {
    "backend": {"_target_": "cpu", "name": "cpu", "options": {}},
    "model": {"_target_": "exp.forecasting.timebridge.TimeBridge", "d_model": 16, "dropout": 0.0},
    "data": {"_target_": "exp.forecasting.data.dataset.ForecastingData", "root": None, "horizon": 96, "num_workers": 0},
    "optim": {"type": "Adam", "lr": 1e-3, "options": {"betas": [0.9, 0.999]}},
    "task": {"name": "train", "input": None},
    "seed": 1, "nproc": 1, "batch_size": 32, "global_batch_size": 32, "max_epochs": 3, "precision": "fp32",
    "init_from": None, "resume": None, "output_dir": "a", "published": {96: {"mse": 0.1}}, "record": {"chosen": {}},
}  # fmt: skip


def changed(**values):
    new = copy.deepcopy(OLD)
    for key, value in values.items():
        *groups, last = key.split("__")
        node = new
        for group in groups:
            node = node[group]
        node[last] = value
    return changes(OLD, new)


@pytest.mark.parametrize(
    ("key", "value"),
    [("optim.lr", 1e-2), ("optim.options.amsgrad", True), ("max_epochs", 5), ("nproc", 2), ("precision", "bf16"),
     ("data.root", "/elsewhere"), ("data.num_workers", 4), ("data.allow_gaps", False), ("patience", 3),
     ("model.activation_checkpointing", True), ("checkpoint.keep_last", 5)],
)  # fmt: skip
def test_what_may_change_is_listed_with_both_values(key, value):
    new = copy.deepcopy(OLD)
    *groups, last = key.split(".")
    node = new
    for group in groups:
        node = node.setdefault(group, {})
    old = {"data.allow_gaps": True, "checkpoint.keep_last": 2}.get(key, node.get(last))
    node[last] = value
    if key.startswith("model."):
        old = None  # TimeBridge has no such key
    assert changes(OLD, new) == Changes((Change(key, old, value),))


@pytest.mark.parametrize(
    ("key", "value"),
    [("optim__type", "SGD"), ("model__d_model", 32), ("model__attention_dropout", 0.5), ("data__horizon", 48),
     ("data__horizon", None), ("seed", 2), ("global_batch_size", 64), ("task__name", "eval"), ("init_from", "other")],
)  # fmt: skip
def test_what_would_make_another_training_is_refused(key, value):
    found = changed(**{key: value})
    assert [change.key for change in found.refused] == [key.replace("__", ".")]
    assert found.refused[0].new == value
    assert not found.allowed


def test_what_has_no_meaning_for_a_training_is_not_listed():
    quiet = changed(output_dir="b", resume="auto", batch_size=16, task__input="x", published={}, record__differs=["y"])
    assert quiet == Changes()
    # Keys that were new after the other was written count with their defaults.
    assert changed(model__alpha=0.35, data__allow_gaps=True, optim__weight_decay=0.0, min_delta=1e-4) == Changes()
    old = {**OLD, "init_from": "weights.pth"}
    assert changes(old, OLD) == Changes(), "weights to begin with are not needed any more"


def test_another_choice_of_a_group_is_one_line():
    other = {"_target_": "gcu", "name": "gcu", "options": {"a": 1}}
    assert changed(backend=other).allowed == (Change("backend._target_", "cpu", "gcu"),)
    assert [each.key for each in changed(model={"_target_": "mine.Model", "width": 3}).refused] == ["model._target_"]


def test_a_refusal_names_both_values_and_the_run():
    first, *more = refusal(changed(data__horizon=48, optim__type="SGD").refused, "outputs/a").splitlines()
    for word in ("data.horizon=96", "48", "init_from=outputs/a"):
        assert word in first
    assert "optim.type=SGD" in more[0]
    accepted = changed(data__horizon=48, resume_changed_data=True)
    assert accepted == Changes((Change("data.horizon", 96, 48),))
