"""The process group eccl: its collectives, and what it refuses."""

from __future__ import annotations

import json

from tests import collectives
from tests.simulators import needs_current_card

pytestmark = needs_current_card

BEGIN = """
import json, os, sys, torch, torch_gcu, torch.distributed as dist
from tests.simulators.scripts import join, rank, refused
device = f"gcu:{rank}"
torch.gcu.set_device(rank)
"""
LEAVE = "sys.stdout.flush()\nos._exit(0)"


def test_every_collective(card):
    finish = "dist.destroy_process_group()\nprint(json.dumps(found), flush=True)"
    script = BEGIN + "join('cpu:gloo,gcu:eccl')\n" + collectives.SCRIPT + finish
    collectives.check(*(json.loads(text.splitlines()[-1]) for text in card(script, 2, SIM_GCU_ECCL_VERSION="2.10")))


def test_what_the_cards_collectives_lack_is_refused_and_64_bits_travel_as_32(card):
    script = """
join("eccl")
x = torch.ones(2, device=device)
refused(lambda: dist.all_reduce(x, op=dist.ReduceOp.AVG), ValueError, "ReduceOp.AVG with ECCL before 2.10")
refused(lambda: dist.all_reduce(x.int(), op=dist.ReduceOp.BOR), ValueError, "BOR")
refused(lambda: dist.all_gather_object([None, None], "text"), RuntimeError, "all_gather_object hangs over eccl")
refused(lambda: dist.gather_object("text", [None, None] if rank == 0 else None), RuntimeError, "gather_object hangs")
wide = torch.tensor([2**40 + 1 + rank], device=device)  # the card keeps 64 bits, the wire does not
assert wide.item() == 2**40 + 1 + rank
dist.all_reduce(wide)
largest = torch.tensor([2**40 * rank + 5 - rank], device=device)
dist.all_reduce(largest, op=dist.ReduceOp.MAX)
whole = torch.zeros(2, dtype=torch.int64, device=device)
dist.all_gather_into_tensor(whole, torch.tensor([2**40 + rank], device=device))
assert (wide.item(), largest.item(), whole.tolist()) == (3, 5, [0, 1])
"""
    card(BEGIN + script + LEAVE, 2, TORCH_GCU_ENABLE_INT64_AND_UINT64="true")


def test_two_ranks_on_one_card_are_refused(card):
    script = """
torch.gcu.set_device(0)
join("cpu:gloo,gcu:eccl")
refused(lambda: dist.all_reduce(torch.ones(1, device="gcu")), RuntimeError, "Duplicate GCU detected")
"""
    card(BEGIN + script + LEAVE, 2)
