"""The lazy graph: what waits, what runs it, and what becomes of a loop that never ends its steps."""

from __future__ import annotations

from tests.simulators import needs_legacy_card

pytestmark = needs_legacy_card


def test_work_waits_until_it_is_needed(card):
    card(
        """
        import torch, torch_gcu
        from torch_gcu.simulator import pending
        x = torch.ones(3, device="xla")
        y = x + 1
        z = y * 2
        assert pending() == 3
        assert z[1:].sum().item() == 8  # a read value runs what it needs: all of it, but no tensor's own value
        del z
        assert pending() == 2  # nobody needs the product any more
        y.cpu()
        assert pending() == 1
        x += 1
        torch_gcu.synchronize()  # waits for what runs; starts nothing
        assert pending() == 2
        torch_gcu.sync_lived_tensor()
        view = x[1:]
        assert pending() == 0  # a view computes nothing
        view.mul_(2)
        torch_gcu.unlazy([x])
        assert pending() == 0 and x.tolist() == [2, 4, 4]
        a, b = torch.ones(2, device="xla:0") + 1, torch.ones(2, device="xla:1") + 1
        torch_gcu.sync_lived_tensor("xla:1")
        assert pending() == 2  # the other card's
        """
    )


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
