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
    collectives.check(*(json.loads(text.splitlines()[-1]) for text in card(script, world_size=2)))


def test_each_library_carries_its_own_device_only(card):
    card(
        JOIN
        + """
torch.gcu.set_device(rank)
join(os.environ["GROUP"])
try:
    dist.all_reduce(torch.ones(1, device="gcu" if os.environ["GROUP"] == "gloo" else "cpu"))
except RuntimeError as error:
    assert "No backend type associated with device type" in str(error), error
else:
    raise AssertionError
""",
        GROUP="gloo",
    )
    card(JOIN + "join('eccl')\ntry:\n    dist.all_reduce(torch.ones(1))\nexcept RuntimeError: sys.exit(0)\nsys.exit(1)")


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
