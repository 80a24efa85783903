"""What becomes of a loop that never ends its steps; what waits in the lazy graph, and what runs it: test_backend.py."""

from __future__ import annotations

from tests.simulators import needs_legacy_card

pytestmark = needs_legacy_card


def test_a_loop_that_never_ends_its_steps_fails(card):
    card(
        """
        import torch, torch_gcu
        from tests.simulators.scripts import refused
        x = torch.ones(2, device="xla")
        def loop(end):
            global x
            for _ in range(400):
                x = x + 1
                end()
        loop(torch_gcu.sync_lived_tensor)
        told = ("this process has grown to 301 operations", "end every step with torch_gcu.optimizer_step")
        refused(lambda: loop(lambda: None), RuntimeError, *told)
        """,
        SIM_GCU_GRAPH_LIMIT="300",
    )
