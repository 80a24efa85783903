"""The framework's own experiments on simulated cards of this generation."""

from __future__ import annotations

import pytest

from tests.simulators import needs_legacy_card

pytestmark = needs_legacy_card

# No dropout: the card has generators of its own.
SAME = ("max_steps=6", "model.attention_dropout=0", "data.num_workers=0")


@pytest.mark.parametrize("nproc", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_losses_are_those_of_one_cpu(exp, nproc):
    card = exp.train("card", "backend=gcu", "backend.simulate=true", f"nproc={nproc}", *SAME)
    cpu = exp.train("cpu", "backend=cpu", "nproc=1", *SAME)
    mine, reference = exp.losses("card"), exp.losses("cpu")
    assert sorted(mine) == [2, 4, 6]
    assert mine == pytest.approx(reference, rel=0, abs=1e-5)
    assert card["simulated"]
    assert card["metrics"] == pytest.approx(cpu["metrics"], rel=1e-5)
    log = (exp.path("card") / "logs" / "rank1.log").read_text()
    assert "xla:1" in log


def test_steps_end_and_no_operator_falls_back(exp):
    """A graph that outgrew one step and an evaluation would fail the run; so would an operator that the card lacks."""
    limits = {"SIM_GCU_GRAPH_LIMIT": "4000", "SIM_GCU_STRICT": "1"}
    exp.train(
        "strict", "backend=gcu", "backend.simulate=true", "nproc=1", "max_steps=40", "data.num_workers=0", **limits
    )
