"""The vendor's own process groups: their collectives, beside torch.distributed, and what they refuse."""

from __future__ import annotations

from tests.simulators import needs_legacy_card

pytestmark = needs_legacy_card

BEGIN = """
import os, torch, torch_gcu
import torch.distributed as torch_dist
import torch_gcu.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("xla", rank)
torch_gcu.set_device(rank)
def refuses(error, text, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"no {error.__name__}: {text}")
"""


def test_collectives(job):
    job(
        BEGIN
        + """
dist.init_process_group("eccl")
assert (dist.get_rank(), dist.get_world_size(), dist.get_backend(), dist.get_local_rank()) == (rank, size, "eccl", rank)
assert dist.is_initialized() and not torch_dist.is_initialized()
assert not hasattr(torch_dist.Backend, "ECCL")
mine = torch.arange(3.0, device=device) + rank
def reduced(op):
    value = mine.clone()
    dist.all_reduce(value, op)
    return value.tolist()
assert reduced(dist.ReduceOp.SUM) == [1, 3, 5] and reduced(dist.ReduceOp.MAX) == [1, 2, 3]
assert reduced(dist.ReduceOp.PRODUCT) == [0, 2, 6]
value = mine.clone()
work = dist.all_reduce(value, async_op=True)
work.wait()
assert value.tolist() == [1, 3, 5]
dist.broadcast(value.copy_(mine), src=1)
assert value.tolist() == [1, 2, 3]
dist.reduce(value.copy_(mine), dst=1)
assert rank == 0 or value.tolist() == [1, 3, 5]
several = [torch.empty(3, device=device) for _ in range(size)]
dist.all_gather(several, mine)
assert [item[0].item() for item in several] == [0, 1]
half = torch.empty(2, device=device)
dist.reduce_scatter(half, [torch.full((2,), float(10 * i + rank), device=device) for i in range(size)])
assert half.tolist() == [20 * rank + 1.0] * 2
dist.gather(mine, several if rank == 1 else None, dst=1)
assert rank == 0 or [item[2].item() for item in several] == [2, 3]
dist.scatter(half, [torch.full((2,), float(i), device=device) for i in range(size)] if rank == 0 else None, src=0)
assert half.tolist() == [rank] * 2
if rank == 0:
    dist.send(mine, dst=1)
else:
    assert dist.recv(value, src=0) == 0 and value.tolist() == [0, 1, 2]
dist.barrier()
pair, alone = dist.new_group([0, 1]), dist.new_group([1])
assert dist.get_rank(pair) == rank and dist.get_rank(alone) == (0 if rank == 1 else -1)
dist.all_reduce(value.copy_(mine), group=alone)
assert value.tolist() == mine.tolist()
dist.all_reduce(value, group=pair)
assert value.tolist() == [1, 3, 5]

# A gloo group of torch's own at the same time carries CPU tensors, and no others.
store = torch_dist.FileStore(os.environ["STORE"], size)
torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
number = torch.ones(1)
torch_dist.all_reduce(number)
assert number.item() == 2
refuses(RuntimeError, "unsupported device type xla", torch_dist.all_reduce, torch.ones(1, device=device))

refuses(RuntimeError, "eccl: tensors must lie on a card, got one on cpu", dist.all_reduce, torch.ones(1))
elsewhere = torch.ones(1, device=f"xla:{rank + 2}")
refuses(RuntimeError, f"eccl: rank {rank} communicates from xla:{rank}, got a tensor on", dist.all_reduce, elsewhere)
refuses(RuntimeError, "contiguous", dist.all_reduce, torch.ones(2, 2, device=device).t())
refuses(TypeError, "ReduceOp", dist.all_reduce, mine, torch_dist.ReduceOp.SUM)
refuses(RuntimeError, "to be of type torch.Tensor", dist.all_reduce, [mine])
refuses(RuntimeError, "twice", dist.init_process_group, "eccl")
refuses(RuntimeError, "only support eccl", dist.new_group, backend="gloo")
torch_dist.destroy_process_group()
dist.destroy_process_group()
assert not dist.is_initialized()
refuses(RuntimeError, "has not been initialized", dist.all_reduce, mine)
refuses(AssertionError, "no process group to destroy", dist.destroy_process_group)
""",
        world_size=2,
    )


def test_groups_that_cannot_be_made(job):
    job(
        BEGIN
        + """
for name in ("gloo", "nccl", "cpu:gloo,xla:eccl"):
    refuses(RuntimeError, f"only support eccl: torch_gcu.distributed.init_process_group was given backend='{name}'",
            dist.init_process_group, name)
refuses(ValueError, "must be a string", dist.init_process_group, 1)
alone = {"store": torch_dist.FileStore("store", 1), "rank": 0, "world_size": 1}
refuses(TypeError, "takes stores of its own classes only", dist.init_process_group, "eccl", **alone)
os.environ["LOCAL_RANK"] = "8"
refuses(RuntimeError, "eccl: LOCAL_RANK=8 has no card; this process sees 8", dist.init_process_group, "eccl")
del os.environ["MASTER_ADDR"]
refuses(ValueError, "MASTER_ADDR expected, but not set", dist.init_process_group, "eccl")
refuses(ValueError, "eccl", torch_dist.init_process_group, "eccl", **alone)  # torch's own package does not know it
"""
    )


def test_two_ranks_on_one_card(job):
    """What becomes of a job whose ranks all use card 0: on a real machine seven of eight cards would sleep."""
    script = """
os.environ.update(LOCAL_RANK="0", **({"TOPS_VISIBLE_DEVICES": os.environ["RANK"]} if APART else {}))
import torch_gcu.distributed as dist
if APART:
    dist.init_process_group("eccl")
    assert dist.get_local_rank() == 0
else:
    try:
        dist.init_process_group("eccl")
    except RuntimeError as error:
        assert str(error).startswith("eccl: ranks 0 and 1 are both on card 0 of host"), error
    else:
        raise AssertionError("both went on")
"""
    for apart in (True, False):
        job("import os\n" + script.replace("APART", str(apart)), world_size=2)
