"""Training through the command line."""

from __future__ import annotations

import pytest

from tests.behaviour.conftest import losses, result


@pytest.mark.parametrize("name", ["forecast", "scenes", "tiles"])
def test_a_training_leaves_its_result_losses_and_checkpoints(trained, name):
    run = trained(name)
    told = result(run)
    assert told["status"] == "completed"
    assert told["steps"] == 4
    assert max(losses(run)) == 4
    assert (run / "checkpoints" / "step_00000004.pth").stat().st_size > 0
    for file in ("config.yaml", "overrides.yaml", "env.json", "logs/rank0.log"):
        assert (run / file).is_file()
