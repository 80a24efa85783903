"""What a training step costs a card must not rise: counted by the benchmark, held to its limits."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tests.simulators import needs_current_card

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@needs_current_card
@pytest.mark.parametrize(
    ("family", "nproc"), [("timebridge", 1), ("prior", 1), ("scenes", 1), ("segmentation", 1), ("timebridge", 2)]
)
def test_a_step_costs_a_card_no_more_than_by_hand(exp, monkeypatch, family, nproc):
    monkeypatch.syspath_prepend(BENCHMARKS)
    counts = importlib.import_module("step_counts")
    arguments, environment = counts.order(family, nproc, str(exp.folder))
    done = exp(*arguments, SIM_GCU_STRICT="1", **environment)  # no operator leaves the card
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = counts.per_step(json.loads((exp.folder / "counts.json").read_text()))
    assert {name for name in found if found[name] > counts.LIMITS[name]} == set(), found
