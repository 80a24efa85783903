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


@pytest.fixture
def make_session(tmp_path):
    """Makes a session of one process on the CPU; ``task`` are keys of the task, ``model`` those of the model."""

    def make(model=None, rank=0, world_size=1, named="predict", **task):
        config = OmegaConf.merge(
            OmegaConf.structured(ExpConfig),
            {"name": "pictures", "model": model or {}, "task": OmegaConf.structured(task_named(named))},
            {"task": task},
        )
        info = RankInfo(rank=rank, world_size=world_size)
        session = Session(config, RunFolder(tmp_path / "run"), info, CpuBackend(name="cpu"))
        session.folder.create()
        session.device, session.distributed = torch.device("cpu"), Distributed()
        return session

    return make
