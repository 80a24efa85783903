"""A hook that kills its own process once, as the kernel does where memory runs out: of the kit's row ``resume``."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from mmengine.hooks import Hook

__all__ = ["KillOnce"]


class KillOnce(Hook):
    """SIGKILL for the last rank, the first time that it has taken ``step`` steps.

    Args:
        step: after this optimizer step.
        mark: a file that is made before, so that it happens once.
    """

    def __init__(self, step: int, mark: str) -> None:
        self.step, self.mark = step, Path(mark)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Die, where it is time."""
        if runner.iter + 1 == self.step and runner.rank == runner.world_size - 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
