"""The vendor's own process groups: their collectives, beside torch.distributed, and what they and its DDP refuse."""

from __future__ import annotations

from tests.simulators import needs_legacy_card

pytestmark = needs_legacy_card

BEGIN = """
import os, torch, torch_gcu
import torch.distributed as torch_dist
import torch_gcu.distributed as dist
from tests.simulators.scripts import join, rank, refused, size
device = torch.device("xla", rank)
torch_gcu.set_device(rank)
"""


def test_collectives_beside_a_gloo_group_and_what_they_refuse(card):
    card(
        BEGIN
        + """
dist.init_process_group("eccl")
assert (dist.get_rank(), dist.get_world_size(), dist.get_backend(), dist.get_local_rank()) == (rank, size, "eccl", rank)
assert not torch_dist.is_initialized() and not hasattr(torch_dist.Backend, "ECCL")
def full(*values):
    return torch.tensor(values, device=device, dtype=torch.float32)
def after(call, *arguments, **options):
    value = mine.clone()
    work = call(value, *arguments, **options)
    if options.get("async_op"):
        work.wait()
    return value.tolist()
mine = full(0, 1, 2) + rank
assert after(dist.all_reduce) == after(dist.all_reduce, async_op=True) == [1, 3, 5]
assert after(dist.all_reduce, dist.ReduceOp.MAX) == after(dist.broadcast, src=1) == [1, 2, 3]
assert after(dist.all_reduce, dist.ReduceOp.PRODUCT) == [0, 2, 6]
assert after(dist.reduce, dst=1) == [1, 3, 5] or rank == 0
several = [full(0, 0, 0), full(0, 0, 0)]
dist.all_gather(several, mine)
assert torch.stack(several).tolist() == [[0, 1, 2], [1, 2, 3]]
dist.gather(mine + 1, several if rank == 1 else None, dst=1)
assert rank == 0 or torch.stack(several).tolist() == [[1, 2, 3], [2, 3, 4]]
half = full(0, 0)
dist.reduce_scatter(half, [full(rank, rank), full(10 + rank, 10 + rank)])
assert half.tolist() == [20 * rank + 1] * 2
dist.scatter(half, [full(7, 7), full(8, 8)] if rank == 0 else None, src=0)
assert half.tolist() == [7 + rank] * 2
assert after(dist.send, dst=1) if rank == 0 else after(dist.recv, src=0) == [0, 1, 2]
dist.barrier()
pair, alone = dist.new_group([0, 1]), dist.new_group([1])
assert dist.get_rank(pair) == rank and dist.get_rank(alone) == (0 if rank == 1 else -1)
assert after(dist.all_reduce, group=alone) == mine.tolist() and after(dist.all_reduce, group=pair) == [1, 3, 5]

join("gloo")  # of torch's own, which carries CPU tensors and no others
number = torch.ones(1)
torch_dist.all_reduce(number)
assert number.item() == 2
refused(lambda: torch_dist.all_reduce(mine), RuntimeError, "unsupported device type xla")
torch_dist.destroy_process_group()

refused(lambda: dist.all_reduce(torch.ones(1)), RuntimeError, "eccl: tensors must lie on a card, got one on cpu")
elsewhere = torch.ones(1, device=f"xla:{rank + 2}")
refused(lambda: dist.all_reduce(elsewhere), RuntimeError, f"rank {rank} communicates from xla:{rank}, got a tensor on")
refused(lambda: dist.all_reduce(mine, torch_dist.ReduceOp.SUM), TypeError, "ReduceOp")
refused(lambda: dist.new_group(backend="gloo"), RuntimeError, "only support eccl")
def wrap(model, *ids, **options):
    return lambda: torch_gcu.nn.parallel.DistributedDataParallel(model, device_ids=list(ids) or None, **options)
linear = torch.nn.Linear(2, 2)
refused(wrap(linear, 0), AssertionError, "only work with single-device GPU modules", "{device(type='cpu')}")
refused(wrap(linear), RuntimeError, "eccl: tensors must lie on a card")
linear.to(device)
refused(wrap(linear, 0, 1), RuntimeError, "can only be None or contain a single element")
refused(wrap(linear, rank, gradient_as_bucket_view=True), RuntimeError, "not support `gradient_as_bucket_view`")
dist.destroy_process_group()
refused(lambda: dist.all_reduce(mine), RuntimeError, "has not been initialized")
name = "cpu:gloo,xla:eccl"
refused(lambda: dist.init_process_group(name), RuntimeError, "only support eccl", f"backend='{name}'")
os.environ["LOCAL_RANK"] = "8"
refused(lambda: dist.init_process_group("eccl"), RuntimeError, "LOCAL_RANK=8 has no card; this process sees 8")
""",
        world_size=2,
        fresh=True,  # a forked process ends at once, and resets connections that the other one has still to close
    )


def test_without_the_collectives_the_import_warns_and_a_group_raises(card):
    script = """
    import pytest
    with pytest.warns(Warning, match="libeccl.so is not there"):
        import torch_gcu.distributed as vendor
    assert not vendor.is_eccl_available()
    with pytest.raises(RuntimeError, match="have ECCL"):
        vendor.init_process_group("eccl", rank=0, world_size=1)
    """
    card(script, SIM_GCU_ECCL="0")
