"""Comparing two traces: what counts as a difference, and in which order."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from exp.checks.parity import compare
from exp.runs.folder import RunFolder

FIRST = {"output/a": [1.0, 2.0], "output/model": [3.0]}
FIRST.update({f"gradient/{name}.weight": [0.5] for name in "ba"})
FIRST.update({f"parameter/{name}.weight": [1.0] for name in "ba"})


@pytest.fixture
def differences(tmp_path):
    """Differences of two traces: one as in FIRST but for ``changes``, and FIRST itself."""

    def run(changes, reference=(), losses=(1.0,), expected=(1.0,)):
        folders = RunFolder(tmp_path / "tested"), RunFolder(tmp_path / "reference")
        for folder, other, values in zip(folders, (changes, dict(reference)), (losses, expected)):
            folder.create()
            trace = {key: values for key, values in {**FIRST, **other}.items() if values is not None}
            arrays = {key: np.array(values, dtype=np.float32) for key, values in trace.items()}
            np.savez(folder.path / "trace.npz", **arrays)
            lines = ({"split": "train", "step": step, "loss": value} for step, value in enumerate(values, 1))
            folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return list(compare(*folders, significant=1e-3))

    return run


def departures(found):
    return [(d.kind, d.step, d.name, d.absolute, d.relative) for d in found if d.absolute > 0]


def test_equal_traces_differ_nowhere_and_come_in_the_order_of_execution(differences):
    found = differences({})
    assert departures(found) == []
    parameters = [(kind, f"{name}.weight") for kind in ("gradient", "parameter") for name in "ba"]
    assert [(d.kind, d.name) for d in found] == [("output", "a"), ("output", "model"), ("loss", "loss"), *parameters]


def test_a_difference_is_relative_to_the_largest_value_and_to_none_that_is_not_finite(differences):
    assert departures(differences({"output/a": [1.0, 4.0]})) == [("output", 1, "a", 2.0, 1.0)]  # not by the 4
    masked = {"output/a": [-math.inf, math.nan]}
    assert departures(differences(masked, masked)) == []
    found = departures(differences({"output/a": [math.nan, 2.0]}))
    assert found == [("output", 1, "a", math.inf, math.inf)]


def test_a_gradient_that_one_of_the_two_lacks_is_a_departure_and_a_module_is_none(differences):
    lacking = {"gradient/b.weight": None}
    for found in (differences(lacking), differences({}, lacking)):
        assert departures(found)[0][:3] == ("gradient", 1, "b.weight")
    assert departures(differences({"output/a": None})) == []


def test_the_direction_of_a_vanishing_gradient_is_not_held_against_the_optimizer(differences):
    traces = [{"gradient/a.weight": [0.5, 1e-9], "parameter/a.weight": [1.0, far]} for far in (2.0, 3.0)]
    assert departures(differences(*traces)) == []
