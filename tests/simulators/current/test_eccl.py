"""The process group eccl: its collectives, and what it refuses."""

from __future__ import annotations

from tests.simulators import needs_current_card

pytestmark = needs_current_card

BEGIN = """
import torch, torch_gcu, torch.distributed as dist
from tests.simulators.scripts import join, rank, refused
device = f"gcu:{rank}"
torch.gcu.set_device(rank)
"""


def test_every_collective(card):
    script = """
join("cpu:gloo,gcu:eccl")
mine = rank + 1.0
def here(*values):
    return torch.tensor(values, device=device)
def after(collective, *values):
    x = here(*values or [mine])
    collective(x)
    return x.tolist()
assert after(dist.all_reduce, mine, 2 * mine) == [3, 6]
assert after(lambda x: dist.all_reduce(x, op=dist.ReduceOp.AVG)) == [1.5]
assert after(lambda x: dist.all_reduce(x, op=dist.ReduceOp.MAX)) == after(lambda x: dist.broadcast(x, 1)) == [2]
assert after(lambda x: dist.all_reduce(x, async_op=True).wait()) == [3]
assert after(lambda x: dist.reduce(x, 0)) == [3] or rank == 1
assert after(lambda x: dist.all_gather_into_tensor(x, here(mine)), 0.0, 0.0) == [1, 2]
assert after(lambda x: dist.scatter(x, [here(7.0), here(8.0)] if rank == 0 else None, 0), 0.0) == [7 + rank]
assert after(lambda x: dist.reduce_scatter(x, [here(mine), here(10 * mine)]), 0.0) == [[3], [30]][rank]
assert after(lambda x: dist.reduce_scatter_tensor(x, here(mine, 10 * mine)), 0.0) == [[3], [30]][rank]
assert after(lambda x: dist.all_to_all_single(x, here(mine, 10 * mine)), 0.0, 0.0) == [[1, 2], [10, 20]][rank]
assert after(lambda x: dist.send(x, 1) if rank == 0 else dist.recv(x, 0)) == [1]
parts = [here(0.0), here(0.0)]
dist.all_gather(parts, here(mine))
assert parts == [1, 2]
dist.gather(here(10 * mine), parts if rank == 0 else None, 0)
assert parts == [10, 20] or rank == 1
dist.all_to_all(parts, [here(mine), here(10 * mine)])
assert parts == [[1, 2], [10, 20]][rank]
for x in (torch.tensor([mine]), here(mine).bfloat16()):  # of the CPU, over gloo; and another type
    dist.all_reduce(x)
    assert x == 3
gathered = [None, None]
dist.all_gather_object(gathered, {"rank": rank})
assert gathered == [{"rank": 0}, {"rank": 1}]
dist.barrier()
"""
    card(BEGIN + script, 2, SIM_GCU_ECCL_VERSION="2.10")


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
    card(BEGIN + script, 2, TORCH_GCU_ENABLE_INT64_AND_UINT64="true")
