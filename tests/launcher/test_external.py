"""launcher=external: processes that somebody else has started make one run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from exp.errors import ConfigError
from exp.launcher.place import Place, given_group, suggested_group

TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
WANTED = Place(3, 4, 1, 2, "127.0.0.1", 29500)


@pytest.mark.parametrize(
    "names",
    [
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        (
            "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ],
)  # fmt: skip
def test_each_launchers_variables_give_the_place(names):
    values = ["3", "4", "1", "2(x2)" if names[0].startswith("SLURM") else "2"]
    assert Place.of({**dict(zip(names, values)), **MASTER}) == WANTED
    assert WANTED.nodes == 2
    assert Place.of(WANTED.environment()) == WANTED


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"RANK": None}, "RANK is not set, but WORLD_SIZE=4"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_ADDR, MASTER_PORT is not set"),
        ({"LOCAL_RANK": None}, "one process per node, or pod: LOCAL_RANK=0"),
        ({"RANK": "4"}, "RANK must be at least 0 and below WORLD_SIZE: RANK=4 WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_RANK must be at least 0 and below LOCAL_WORLD_SIZE"),
        ({"WORLD_SIZE": "5"}, "every node must have as many processes"),
        ({"LOCAL_WORLD_SIZE": "4"}, "on one node LOCAL_RANK must be RANK"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is no port"),
        ({"RANK": "first"}, "RANK=first is no whole number"),
        (dict.fromkeys(TORCH), "finds none"),
    ],
)
def test_variables_that_do_not_go_together_are_refused(change, text):
    given = {**TORCH, **MASTER, **change}
    with pytest.raises(ConfigError, match=re.escape(text)):
        Place.of({name: value for name, value in given.items() if value is not None})


def test_leftovers_are_told_from_a_living_group():
    whole = {**TORCH, **MASTER}
    assert given_group(whole).startswith("RANK=3 WORLD_SIZE=4 ")
    assert given_group({name: value for name, value in whole.items() if name != "LOCAL_WORLD_SIZE"}) is not None
    assert given_group({**whole, "WORLD_SIZE": "1"}) is None
    assert given_group({**whole, "RANK": "7"}) is None
    assert given_group({name: value for name, value in whole.items() if name != "MASTER_PORT"}) is None
    gone = {**whole, "MASTER_ADDR": "192.0.2.1"}  # an address that nobody has (RFC 5737)
    assert given_group(gone) is None
    assert given_group({**gone, "TORCHELASTIC_RUN_ID": "none"}) is not None
    with subprocess.Popen([sys.executable, "-c", "input()"], env={**gone, "RANK": "2"}, stdin=subprocess.PIPE):
        assert given_group(gone) is not None


OMPI = {
    "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}  # fmt: skip
SBATCH = {name: value for name, value in SRUN.items() if "STEP" not in name}  # as a batch script has it


@pytest.mark.parametrize(
    ("given", "refused", "suggested"),
    [
        (OMPI, True, True),
        (MPICH, True, True),
        ({**OMPI, "OMPI_COMM_WORLD_SIZE": "1"}, False, False),
        ({**MPICH, "PMI_SIZE": "1"}, False, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, False, False),
        ({**OMPI, "OMPI_COMM_WORLD_SIZE": "two"}, False, False),
        # Left over of torch's, below an mpirun of one process.
        ({**OMPI, "OMPI_COMM_WORLD_SIZE": "1", **TORCH, **MASTER, "MASTER_ADDR": "192.0.2.1"}, False, False),
        (SRUN, False, True),
        ({**SRUN, "PMI_RANK": "0", "PMI_SIZE": "2"}, False, True),  # srun --mpi=pmi2
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, False, False),  # srun -n1 --pty bash
        (SBATCH, False, False),
        ({}, False, False),
    ],
)
def test_groups_of_mpi_and_srun_are_known_without_a_master(given, refused, suggested):
    assert (given_group(given) is not None) is refused
    assert (suggested_group(given) is not None) is suggested
    assert given_group(given, 2) is None, "one agent on each of two nodes is as it should be"
    assert suggested_group(given, 2) is None
