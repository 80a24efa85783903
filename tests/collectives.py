"""Every collective, once, between two ranks: a script that calls them, and what they must give."""

from __future__ import annotations

from typing import Any

SCRIPT = """
def here(*values):
    return torch.tensor(values, device=device)

mine = rank + 1.0
found = {}

x = here(mine, 2 * mine)
dist.all_reduce(x)
found["sum"] = x.tolist()
x = here(mine)
dist.all_reduce(x, op=dist.ReduceOp.AVG)
found["average"] = x.tolist()
x = here(mine)
dist.all_reduce(x, op=dist.ReduceOp.MAX)
found["max"] = x.tolist()
x = torch.tensor([mine])  # on the CPU
dist.all_reduce(x)
found["cpu"] = x.tolist()
x = here(mine)
dist.broadcast(x, 1)
found["broadcast"] = x.tolist()
x = here(mine)
dist.reduce(x, 0)
found["reduce"] = x.tolist() if rank == 0 else None
parts = [here(0.0) for _ in range(2)]
dist.all_gather(parts, here(mine))
found["all_gather"] = torch.cat(parts).tolist()
x = here(0.0, 0.0)
dist.all_gather_into_tensor(x, here(mine))
found["all_gather_into_tensor"] = x.tolist()
parts = [here(0.0) for _ in range(2)] if rank == 0 else None
dist.gather(here(mine), parts, 0)
found["gather"] = torch.cat(parts).tolist() if rank == 0 else None
x = here(0.0)
dist.scatter(x, [here(7.0), here(8.0)] if rank == 0 else None, 0)
found["scatter"] = x.tolist()
x = here(0.0)
dist.reduce_scatter(x, [here(mine), here(10 * mine)])
found["reduce_scatter"] = x.tolist()
x = here(0.0)
dist.reduce_scatter_tensor(x, here(mine, 10 * mine))
found["reduce_scatter_tensor"] = x.tolist()
x = here(0.0, 0.0)
dist.all_to_all_single(x, here(mine, 10 * mine))
found["all_to_all_single"] = x.tolist()
outputs = [here(0.0), here(0.0)]
dist.all_to_all(outputs, [here(mine), here(10 * mine)])
found["all_to_all"] = torch.cat(outputs).tolist()
x = here(mine)
work = dist.all_reduce(x, async_op=True)
work.wait()
found["asynchronous"] = x.tolist()
x = here(mine).bfloat16()
dist.all_reduce(x)
found["bfloat16"] = x.tolist()
x = here(mine)
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
found["send"] = x.tolist()
gathered = [None, None]
dist.all_gather_object(gathered, {"rank": rank})
found["objects"] = gathered
dist.barrier()
"""
"""Takes ``rank``, ``device``, ``dist`` and ``torch``; leaves the results in ``found``."""


def check(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Compare ``found`` of rank 0 and of rank 1 with what the collectives must give."""
    for found in (first, second):
        assert found["sum"] == [3.0, 6.0]
        assert found["cpu"] == found["asynchronous"] == found["bfloat16"] == [3.0]
        assert found["average"] == [1.5]
        assert found["max"] == found["broadcast"] == [2.0]
        assert found["all_gather"] == found["all_gather_into_tensor"] == [1.0, 2.0]
        assert found["send"] == [1.0]
        assert found["objects"] == [{"rank": 0}, {"rank": 1}]
    assert (first["reduce"], first["gather"]) == ([3.0], [1.0, 2.0])
    assert (first["scatter"], second["scatter"]) == ([7.0], [8.0])
    for name in ("reduce_scatter", "reduce_scatter_tensor"):
        assert (first[name], second[name]) == ([3.0], [30.0]), name
    for name in ("all_to_all_single", "all_to_all"):
        assert (first[name], second[name]) == ([1.0, 2.0], [10.0, 20.0]), name
