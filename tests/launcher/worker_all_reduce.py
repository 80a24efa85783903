"""A worker for the tests: joins a gloo group, sums the ranks, then does what TEST_BODY says."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

from exp.launcher.rank import make_store
from exp.worker import main


def body(folder, info):
    import torch
    import torch.distributed as dist

    store = make_store(info, timedelta(seconds=240))
    dist.init_process_group("gloo", store=store, rank=info.rank, world_size=info.world_size)
    total = torch.tensor([float(info.rank)])
    dist.all_reduce(total)
    what = os.environ.get("TEST_BODY", "")
    if (what, info.rank) in (("sleep", 1), ("raise-stubborn", 0)):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if what == "sleep":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])  # a grandchild
    (folder.path / f"joined-{info.restart_count}-{info.rank}").write_text(str(total.item()))
    if what.startswith("raise") and info.rank == 1:
        raise ValueError("the second rank does not like it\nand says why")
    if what.startswith("SIG") and info.restart_count == 0:
        if info.rank == 1:
            os.kill(os.getpid(), signal.Signals[what])
        if not info.single_node:
            time.sleep(300)  # as in a collective of a card's: this rank does not notice
    if what in ("sleep", "raise-stubborn"):
        time.sleep(300)
    dist.barrier()
    dist.destroy_process_group()
    if what == "late" and info.rank == 1:
        time.sleep(12)  # torch's heartbeats are five seconds apart


if __name__ == "__main__":
    main(body)
