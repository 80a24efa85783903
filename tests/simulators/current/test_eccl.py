"""The process group eccl: its collectives, and what it refuses."""

from __future__ import annotations

import json

from tests import collectives
from tests.simulators import needs_current_card

pytestmark = needs_current_card

JOIN = """
import os, sys, warnings, torch, torch_gcu, torch.distributed as dist
from datetime import timedelta
warnings.simplefilter("ignore")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def join(name="cpu:gloo,gcu:eccl"):
    store = dist.FileStore(os.environ["STORE"], size)
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=240))
"""

FINISH = """
import json
dist.destroy_process_group()
print(json.dumps(found), flush=True)
"""


def test_every_collective(card):
    script = JOIN + "torch.gcu.set_device(rank)\njoin()\ndevice = f'gcu:{rank}'\n" + collectives.SCRIPT + FINISH
    collectives.check(*(json.loads(text.splitlines()[-1]) for text in card(script, 2, SIM_GCU_ECCL_VERSION="2.10")))


def test_what_the_cards_collectives_lack_is_refused_and_64_bits_travel_as_32(card):
    card(
        JOIN
        + """
torch.gcu.set_device(rank)
join("eccl")
def refused(action, error, *texts):
    try:
        action()
    except error as said:
        assert all(text in str(said) for text in texts), str(said)
        return
    raise AssertionError(f"nothing refused: {texts}")
x = torch.ones(2, device="gcu")
refused(lambda: dist.all_reduce(x, op=dist.ReduceOp.AVG), ValueError, "ReduceOp.AVG with ECCL before 2.10")
refused(lambda: dist.all_reduce(x.int(), op=dist.ReduceOp.BOR), ValueError, "BOR")
refused(lambda: dist.all_gather_object([None, None], "text"), RuntimeError, "all_gather_object hangs over eccl")
refused(lambda: dist.gather_object("text", [None, None] if rank == 0 else None), RuntimeError, "gather_object hangs")
wide = torch.tensor([2**40 + 1 + rank], device="gcu")  # the card keeps 64 bits, the wire does not
assert wide.item() == 2**40 + 1 + rank
dist.all_reduce(wide)
assert wide.item() == 3, wide
dist.all_reduce(other := torch.tensor([2**40 * rank + 5 - rank], device="gcu"), op=dist.ReduceOp.MAX)
assert other.item() == 5, other
whole = torch.zeros(2, dtype=torch.int64, device="gcu")
dist.all_gather_into_tensor(whole, torch.tensor([2**40 + rank], device="gcu"))
assert whole.tolist() == [0, 1], whole
sys.stdout.flush()
os._exit(0)
""",
        2,
        TORCH_GCU_ENABLE_INT64_AND_UINT64="true",
    )


def test_two_ranks_on_one_card_are_refused(card):
    card(
        JOIN
        + """
torch.gcu.set_device(0)
join()
try:
    dist.all_reduce(torch.ones(1, device="gcu"))
except RuntimeError as error:
    assert "Duplicate GCU detected" in str(error), error
else:
    raise AssertionError
sys.stdout.flush()
os._exit(0)
""",
        world_size=2,
    )
