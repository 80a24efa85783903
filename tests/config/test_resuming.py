"""Which changes of a configuration a continued training takes, and which it refuses."""

from __future__ import annotations

import copy

from exp.config.diff import Change, Changes, resume_changes

OLD = {
    "backend": {"_target_": "cpu", "name": "cpu", "options": {}},
    "model": {"_target_": "exp.forecasting.timebridge.model.TimeBridge", "d_model": 16, "dropout": 0.0},
    "data": {"_target_": "exp.forecasting.data.dataset.ForecastingData", "root": None, "horizon": 96, "num_workers": 0},
    "optim": {"type": "Adam", "lr": 1e-3, "options": {"betas": [0.9, 0.999]}},
    "task": {"name": "train", "input": None},
    "seed": 1, "nproc": 1, "batch_size": 32, "global_batch_size": 32, "max_epochs": 3, "precision": "fp32",
    "init_from": None, "resume": None, "output_dir": "a",
    "reference": {"metrics": {96: {"mse": 0.1}}}, "record": {"chosen": {}},
}  # fmt: skip


def changed(values):
    """The changes that these values make, by dotted key."""
    new = copy.deepcopy(OLD)
    for key, value in values.items():
        *groups, last = key.split(".")
        node = new
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = value
    return resume_changes(OLD, new)


def test_what_may_change_is_listed_with_both_values():
    for key, old, value in (
        ("optim.lr", 1e-3, 1e-2), ("max_epochs", 3, 5), ("nproc", 1, 2),
        ("precision", "fp32", "bf16"), ("data.root", None, "/elsewhere"), ("data.num_workers", 0, 4),
        ("patience", None, 3), ("model.backbone.activation_checkpointing", None, True),
    ):  # fmt: skip
        assert changed({key: value}) == Changes((Change(key, old, value),)), key


def test_what_would_make_another_training_is_refused():
    """Also a key that one of the two lacks; all keys: tests/engine/test_lists.py."""
    for key, value in (("data.horizon", 48), ("data.horizon", None), ("model.attention_dropout", 0.5), ("seed", 2)):
        found = changed({key: value})
        assert [(change.key, change.new, found.allowed) for change in found.refused] == [(key, value, ())]


def test_of_another_class_only_the_class_is_named():
    """The keys of one class mean nothing to another: 21 of them hid what was changed."""
    found = changed({"model": {"_target_": "my_net.DLinear", "lookback": 96}, "seed": 2})
    assert [change.key for change in found.refused] == ["model._target_", "seed"]


def test_what_has_no_meaning_for_a_training_is_not_listed():
    quiet = {"output_dir": "b", "resume": "auto", "batch_size": 16, "task.input": "x", "reference": {}}
    assert changed({**quiet, "record.differs": ["y"]}) == Changes()
    assert resume_changes({**OLD, "init_from": "weights.pth"}, OLD) == Changes(), (
        "weights to begin with are needed no more"
    )
