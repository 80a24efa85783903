"""F14: `export TORCH_DISTRIBUTED_BACKEND=gloo` was the users' way round trouble with a vendor's collectives.

Torch does not know the variable; scripts that read it did what they liked with it.

With exp it is honoured, and said; `backend.process_group=gloo` is the configured form, and wins.
"""

from __future__ import annotations

import pytest

from tests.field.conftest import CARDS, JOIN
from tests.simulators import needs_card


def test_stock_torch_ignores_it(stock):
    script = JOIN + "join(None)\nprint(dist.get_backend_config() if hasattr(dist, 'get_backend_config') else 'refused')"
    (ended,) = stock(script, TORCH_DISTRIBUTED_BACKEND="mpi")
    assert "mpi" not in ended.printed.splitlines()[-1]


@pytest.mark.slow
@needs_card
def test_exp_honours_it_and_names_it(exp):
    done = exp(*CARDS, "nproc=2", "output_dir=run", TORCH_DISTRIBUTED_BACKEND="gloo")
    assert done.returncode == 0, done.stderr
    assert "because TORCH_DISTRIBUTED_BACKEND names gloo" in done.stdout
    assert exp.result("run")["fallback"]["reason"] == "TORCH_DISTRIBUTED_BACKEND names gloo"
