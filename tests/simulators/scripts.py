"""What scripts on simulated cards share; each rank is a process of its own."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Callable

import pytest
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def refused(action: Callable[[], Any], error: Any, *texts: str) -> None:
    """Assert that ``action`` raises this error, with these texts in its message."""
    with pytest.raises(error) as said:
        action()
    assert all(text in str(said.value) for text in texts), str(said.value)


def join(name: str) -> None:
    """Make a process group of torch's."""
    store = dist.FileStore(os.environ["STORE"] + "".join(filter(str.isalpha, name)), size)
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=240))
