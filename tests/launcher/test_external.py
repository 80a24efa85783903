"""launcher=external: processes that somebody else has started make one run."""

from __future__ import annotations

import re

import pytest

from exp.errors import ConfigError
from exp.launcher.rank_environment import rank_environment
from exp.session import RankInfo

FAMILIES = {
    "torchrun": "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE",
    "mpirun": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPICH": "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
    "srun": "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE",
}


def variables(family: str, *values: str) -> dict[str, str]:
    return dict(zip(FAMILIES[family].split(), values))


TORCH = variables("torchrun", "3", "4", "1", "2")
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
WANTED = {**TORCH, **MASTER}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_launchers_variables_give_the_place(family):
    assert (
        rank_environment({**variables(family, "3", "4", "1", "2(x2)" if family == "srun" else "2"), **MASTER}) == WANTED
    )
    assert RankInfo.of(WANTED) == RankInfo(3, 4, 1, 2)
    with pytest.raises(ConfigError, match=f"{FAMILIES[family].split()[3]}=2,1,1"):
        rank_environment({**variables(family, "0", "4", "0", "2,1,1"), **MASTER})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": None}, "but RANK is not set; set it"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "but MASTER_ADDR, MASTER_PORT is not set"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK=0"),
        ({"RANK": "4"}, "RANK=4 WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": None}, "(LOCAL_WORLD_SIZE, or nproc: 1)"),
        ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4"),
        ({"RANK": "first"}, "RANK=first"),
        (dict.fromkeys(TORCH), "finds none"),
    ],
)
def test_variables_that_do_not_go_together_are_refused(change, text):
    given = {**TORCH, **MASTER, **change}
    with pytest.raises(ConfigError, match=re.escape(text)):
        rank_environment({name: value for name, value in given.items() if value is not None})
