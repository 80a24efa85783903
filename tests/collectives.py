"""Every collective, once, between two ranks: a script that calls them, and what they must give."""

from __future__ import annotations

from typing import Any

SCRIPT = """
mine = rank + 1.0
found = {}

def here(*values):
    return torch.tensor(values, device=device)

def note(name, collective, *values):
    x = here(*values)
    collective(x)
    found[name] = x.tolist()

note("sum", dist.all_reduce, mine, 2 * mine)
note("average", lambda x: dist.all_reduce(x, op=dist.ReduceOp.AVG), mine)
note("max", lambda x: dist.all_reduce(x, op=dist.ReduceOp.MAX), mine)
note("asynchronous", lambda x: dist.all_reduce(x, async_op=True).wait(), mine)
note("broadcast", lambda x: dist.broadcast(x, 1), mine)
note("reduce", lambda x: dist.reduce(x, 0), mine)
note("all_gather_into_tensor", lambda x: dist.all_gather_into_tensor(x, here(mine)), 0.0, 0.0)
note("scatter", lambda x: dist.scatter(x, [here(7.0), here(8.0)] if rank == 0 else None, 0), 0.0)
note("reduce_scatter", lambda x: dist.reduce_scatter(x, [here(mine), here(10 * mine)]), 0.0)
note("reduce_scatter_tensor", lambda x: dist.reduce_scatter_tensor(x, here(mine, 10 * mine)), 0.0)
note("all_to_all_single", lambda x: dist.all_to_all_single(x, here(mine, 10 * mine)), 0.0, 0.0)
note("send", lambda x: dist.send(x, 1) if rank == 0 else dist.recv(x, 0), mine)
for name, x in (("cpu", torch.tensor([mine])), ("bfloat16", here(mine).bfloat16())):
    dist.all_reduce(x)
    found[name] = x.tolist()
parts = [here(0.0), here(0.0)]
dist.all_gather(parts, here(mine))
found["all_gather"] = torch.cat(parts).tolist()
dist.gather(here(10 * mine), parts if rank == 0 else None, 0)
found["gather"] = torch.cat(parts).tolist()
dist.all_to_all(parts, [here(mine), here(10 * mine)])
found["all_to_all"] = torch.cat(parts).tolist()
gathered = [None, None]
dist.all_gather_object(gathered, {"rank": rank})
found["objects"] = gathered
dist.barrier()
"""
"""Takes ``rank``, ``device``, ``dist`` and ``torch``; leaves the results in ``found``."""

BOTH = {
    "sum": [3.0, 6.0], "average": [1.5], "max": [2.0], "asynchronous": [3.0], "broadcast": [2.0], "send": [1.0],
    "cpu": [3.0], "bfloat16": [3.0], "all_gather": [1.0, 2.0], "all_gather_into_tensor": [1.0, 2.0],
    "objects": [{"rank": 0}, {"rank": 1}],
}  # fmt: skip
FIRST = {
    "reduce": [3.0], "gather": [10.0, 20.0], "scatter": [7.0], "reduce_scatter": [3.0], "reduce_scatter_tensor": [3.0],
    "all_to_all_single": [1.0, 2.0], "all_to_all": [1.0, 2.0],
}  # fmt: skip
SECOND = {
    "scatter": [8.0], "reduce_scatter": [30.0], "reduce_scatter_tensor": [30.0],
    "all_to_all_single": [10.0, 20.0], "all_to_all": [10.0, 20.0],
}  # fmt: skip


def check(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Compare ``found`` of rank 0 and of rank 1 with what the collectives must give."""
    for found, own in ((first, FIRST), (second, SECOND)):
        assert {name: found[name] for name in {**BOTH, **own}} == {**BOTH, **own}
