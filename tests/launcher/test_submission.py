"""What sbatch is given: options that are exp's own are refused by name, and no variables of another job."""

from __future__ import annotations

import os
import re

import pytest

from exp.errors import ConfigError
from exp.launcher.slurm.keys import SubmititConfig
from exp.launcher.slurm.submission import asks_for_cards, check_options, environment_for

SCRIPT = "#!/bin/bash\n#SBATCH --mem=2048M\n#SBATCH --time=60\n#SBATCH --requeue\n#SBATCH --wckey=submitit\n"
# As Slurm sets them in a job, and as users set them.
OUTER = {
    "SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "300", "SLURM_CPUS_PER_TASK": "3", "SLURM_EXPORT_ENV": "NONE",
    "SLURMD_NODENAME": "n1", "SRUN_DEBUG": "3", "SBATCH_MEM_BIND": "none", "PMI_RANK": "0", "CARDS": "5",
}  # fmt: skip
OWN = {"SLURM_CONF": "/lab/slurm.conf", "SBATCH_ACCOUNT": "me", "SBATCH_WCKEY": "mine", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("option", "named", "instead"),
    [("nodes", "--nodes", "launcher.nodes"), ("ntasks_per_node", "--ntasks-per-node", "nproc"),
     ("ntasks-per-node", "--ntasks-per-node", "nproc"), ("tasks_per_node", "--tasks-per-node", "nproc"),
     ("ntasks", "--ntasks", "nproc"), ("array", "--array", "-m"), ("arr", "--array", "-m"),
     ("signal", "--signal", "launcher.signal_delay_s"), ("time", "--time", "launcher.time_minutes"),
     ("mem", "--mem", "launcher.mem_gib"), ("--gres", "--gres", "launcher.gres"),
     ("no_requeue", "--no-requeue", "requeue=false"), ("output", "--output", "reads"), ("quiet", "--quiet", "reads"),
     ("clusters", "--clusters", "SLURM_CONF")],
)  # fmt: skip
def test_an_option_that_exp_sets_is_refused_by_name(option, named, instead):
    with pytest.raises(ConfigError, match=re.escape(f"launcher.extra.{option} ")) as refused:
        check_options({option: 4}, [])
    assert f"{named} " in str(refused.value)
    assert instead in str(refused.value)


def test_options_of_srun_likewise_and_all_others_are_the_users():
    for word in ("--ntasks=4", "--ntasks", "-n4", "-n", "-N2", "--nodes=2", "--out=x"):
        with pytest.raises(ConfigError, match=re.escape(f"launcher.srun_args={word}")):
            check_options({}, [word])
    others = (
        "requeue",
        "mail_type",
        "mem_per_cpu",
        "gres-flags",
        "time-min",
        "wait_all_nodes",
        "gpus-per-node",
        "nice",
    )
    check_options(dict.fromkeys(others, 1), ["--label", "--mem=0", "--gres=none", "4", "-l", "--cpu-bind=none"])


def test_a_job_that_is_submitted_from_a_job_gets_none_of_its_variables(monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH", "SRUN"))]:
        monkeypatch.delenv(name)
    for name, value in {**OUTER, **OWN, "SBATCH_TIMELIMIT": "5", "SBATCH_GPUS": "1"}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with environment_for(SCRIPT, hidden=["CARDS"]):
        left = dict(os.environ)
    assert dict(os.environ) == before
    assert {name for name in before if name not in left} == {*OUTER, "SBATCH_TIMELIMIT", "SBATCH_GPUS"}
    assert capsys.readouterr().err == ""


def test_what_users_set_for_sbatch_counts_unless_a_key_says_otherwise(monkeypatch, capsys):
    """A variable has precedence over the option in a script, so ``launcher.time_minutes`` would have no effect."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH", "SRUN"))]:
        monkeypatch.delenv(name)
    lose = {"SBATCH_TIMELIMIT": "5", "SBATCH_MEM_PER_CPU": "1G", "SBATCH_NO_REQUEUE": "1", "SBATCH_ARRAY_INX": "0-3"}
    kept = {**OWN, "SBATCH_GPUS": "1", "SLURM_CPU_BIND": "none", "CARDS": "5"}
    for name, value in {**lose, **kept}.items():
        monkeypatch.setenv(name, value)
    with environment_for(SCRIPT, hidden=["CARDS"]):
        left = dict(os.environ)
    assert {name for name in (*lose, *kept) if name in left} == {*kept}
    warned = capsys.readouterr().err
    assert [name for name in lose if name not in warned] == []


@pytest.mark.parametrize(
    ("keys", "variable", "asks"),
    [({}, None, False), ({"gres": "gpu:8"}, None, True), ({"exclusive": True}, None, True),
     ({"extra": {"gpus_per_node": 8}}, None, True), ({"extra": {"tres-per-task": "gres/gpu:1"}}, None, True),
     ({"extra": {"gpu_bind": "none", "gpus": None}}, None, False), ({}, "SBATCH_GPUS_PER_NODE", True)],
)  # fmt: skip
def test_what_asks_for_cards(keys, variable, asks, monkeypatch):
    if variable is not None:
        monkeypatch.setenv(variable, "8")
    assert asks_for_cards(SubmititConfig(**keys)) is asks
