"""Training on a simulated card is the CPU's training, bit for bit, with one card and with several."""

from __future__ import annotations

from tests.simulators import needs_current_card

pytestmark = needs_current_card


def test_one_card(card):
    card(
        """
        import torch, torch_gcu
        from tests.simulators.network import train
        for options in ({}, {"foreach": True}, {"fused": True}):
            torch.testing.assert_close(train("gcu:1", **options), train("cpu", **options), rtol=0, atol=0)
        assert torch_gcu.simulator.fallbacks()["aten::native_layer_norm_backward"]  # with the CPU's numbers, too
        """
    )


def test_several_cards(card):
    card(
        """
        import os, sys, torch, torch_gcu, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from tests.simulators.network import train
        from tests.simulators.scripts import join, rank
        torch.gcu.set_device(rank)
        results = []
        for name, device in (("cpu:gloo,gcu:eccl", f"gcu:{rank}"), ("gloo", "cpu")):
            join(name)
            ids = [rank] if device != "cpu" else None
            results.append(train(device, 2, lambda model: DistributedDataParallel(model, device_ids=ids), rank))
            dist.destroy_process_group()
        torch.testing.assert_close(*results, rtol=0, atol=0)
        sys.stdout.flush()
        os._exit(0)  # torch 2.13 may abort while the interpreter is taken down after a backward pass
        """,
        world_size=2,
    )
