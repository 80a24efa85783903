from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from exp.backends.cpu import CpuBackend

from exp.config.sources import task_class_by_name
from exp.distributed import Distributed
from exp.session import RankInfo
from tests.vision.data.conftest import make_data, segmentation, tiff  # noqa: F401 - fixtures


@pytest.fixture
def make_session(tmp_path):
    """Makes what a prediction needs of a session on the CPU, with keys of its task."""

    def make(rank=0, world_size=1, task_name="predict", **task):
        config = SimpleNamespace(precision="fp32", task=task_class_by_name(task_name)(**task))
        device = {"backend": CpuBackend(name="cpu"), "device": torch.device("cpu"), "distributed": Distributed()}
        place = {"folder": SimpleNamespace(path=tmp_path), "info": RankInfo(rank=rank, world_size=world_size)}
        return SimpleNamespace(config=config, **device, **place)

    return make
