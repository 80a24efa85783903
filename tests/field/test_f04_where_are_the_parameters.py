"""F4: to see where parameters lived, users patched the installed engine with prints, and restored it from a backup.

With exp a report is one key away, in the log of each rank: parameter count, devices with counts, the first parameters
with device, shape and type, and the rank's place in the job. There is nothing to reproduce.
"""

from __future__ import annotations

from tests.field.conftest import CARDS
from tests.simulators import needs_card


@needs_card
def test_each_rank_reports_where_its_parameters_are(exp):
    done = exp(*CARDS, "nproc=2", "report_placement=true", "output_dir=run")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        log = (exp.path("run") / "logs" / f"rank{rank}.log").read_text()
        (device,) = {f"{name}:{rank}" for name in ("gcu", "xla") if f"device {name}:{rank}" in log}
        assert f"placement: rank {rank}  local_rank {rank}  world_size 2  device {device}" in log
        assert f"tensors by device: {device} " in log
        assert f"embedding.proj.0.weight: {device}, shape (16, 24), torch.float32" in log
