"""Backends that are ill in the way that the variable SICK says: ``{"<local rank>": "<illness>"}``."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

from exp.backends.cpu import CpuBackend


def illness(local_rank: int) -> str:
    return json.loads(os.environ.get("SICK", "{}")).get(str(local_rank), "")


class SickBackend(CpuBackend):
    """The CPU as four cards, with a number each."""

    capabilities = replace(CpuBackend.capabilities, shared_device=False)
    rank = 0

    def device_count(self):
        return 4

    def worker_env(self, local_rank, local_world_size, single_node):
        self.rank = local_rank
        if illness(local_rank) == "never starts":
            time.sleep(300)
        return super().worker_env(local_rank, local_world_size, single_node)

    def device_info(self, device):
        return {**super().device_info(device), "card": self.rank}

    def usage(self):
        return {"free": 2**20 if illness(self.rank) == "full" else 2**33, "total": 2**33}

    def autocast(self, precision):
        if illness(self.rank) == "breaks":
            raise RuntimeError("the driver says no\nand more")
        return super().autocast(precision)

    def synchronize(self):
        if illness(self.rank) == "slow":
            time.sleep(0.1)

    def packages(self):
        return {"library": "2" if illness(self.rank) == "other library" else "1"}

    def monitor(self):
        path = os.environ.get("SICK_MONITOR")
        return json.loads(Path(path).read_text()) if path else []
