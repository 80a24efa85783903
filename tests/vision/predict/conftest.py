from __future__ import annotations

import pytest
import torch
from exp.backends.cpu import CpuBackend
from omegaconf import OmegaConf

from exp.config.schema import ExpConfig
from exp.config.structures import task_named
from exp.engine.distributed import Distributed
from exp.launcher.rank import RankInfo
from exp.runfolder import RunFolder
from exp.session import Session
from tests.vision.data.conftest import tiff  # noqa: F401 - a fixture


@pytest.fixture
def make_session(tmp_path):
    """Makes a session of one process on the CPU; ``task`` are keys of the task that is ``named``."""

    def make(rank=0, world_size=1, named="predict", **task):
        config = OmegaConf.structured(ExpConfig(name="pictures", task=task_named(named)(**task)))
        info = RankInfo(rank=rank, world_size=world_size)
        session = Session(config, RunFolder(tmp_path / "run"), info, CpuBackend(name="cpu"))
        session.folder.create()
        session.device, session.distributed = torch.device("cpu"), Distributed()
        return session

    return make
