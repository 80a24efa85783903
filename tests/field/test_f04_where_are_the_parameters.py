"""F4: to see where parameters lived, users patched the installed engine with prints, and restored it from a backup.

With exp a report is one key away, in the log of each rank: parameter count, devices with counts, the first parameters
with device, shape and type, and the rank's place in the job. There is nothing to reproduce: the engine says nothing.
"""

from __future__ import annotations

import re

from tests.simulators import needs_card


@needs_card
def test_each_rank_reports_where_its_parameters_are(eight_cards):
    group = eight_cards.result["process_group"]
    for rank in range(8):
        device = f"{eight_cards.result['device_type']}:{rank}"
        _, head, report = eight_cards.log(rank).partition(
            f"placement: rank {rank}  local_rank {rank}  world_size 8  device {device}  {group}\n"
        )
        assert head, eight_cards.log(rank)
        counts, *parameters = report.splitlines()[:6]
        assert re.fullmatch(rf"  [\d,]+ values in \d+ parameters; tensors by device: {device} \d+", counts)
        assert parameters[0] == f"  embedding.proj.0.weight: {device}, shape (16, 24), torch.float32"
        assert all(f": {device}, shape (" in line for line in parameters)
