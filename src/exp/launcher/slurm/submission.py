"""What a job gets from its submission: the options of sbatch and srun that exp sets itself, and the environment."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any, Iterable, Iterator, Mapping, Sequence

from exp import console
from exp.errors import ConfigError

__all__ = ["asks_for_cards", "check_options", "environment_for"]

_KEYS: Mapping[str, str] = {
    "cpus-per-task": "launcher.cpus_per_node", "mem": "launcher.mem_gib", "signal": "launcher.signal_delay_s",
    "time": "launcher.time_minutes", "no-requeue": "launcher.extra.requeue=false",
    **{name: f"launcher.{name.replace('-', '_')}" for name in (
        "account", "constraint", "exclude", "exclusive", "gres", "job-name", "nodelist", "nodes", "partition", "qos",
    )},
}  # fmt: skip
"""Options of sbatch for which there is a key."""
_INTERNAL: Mapping[str, str] = {
    "array": "start a sweep (-m)", "clusters": "set SLURM_CONF", "test-only": "set launcher.dry_run=true",
    **dict.fromkeys(("ntasks", "ntasks-per-node", "tasks-per-node"), "set nproc"),
    **dict.fromkeys(("error", "input", "open-mode", "output"), "since exp reads their output"),
    **dict.fromkeys(("parsable", "quiet", "wait", "wrap"), "since exp reads what sbatch prints"),
}  # fmt: skip
"""Options of sbatch that exp sets, or relies on not being set, and the rest of the error message."""
_OF_SRUN = ("cpus-per-task", "error", "nodes", "ntasks", "ntasks-per-node", "output")
_SHORT = {"n": "ntasks", "N": "nodes", "c": "cpus-per-task", "o": "output", "e": "error"}
_CARDS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "tres-per-job", "tres-per-node",
          "tres-per-socket", "tres-per-task")  # fmt: skip
# Of the job that this process is part of: the cluster, who pays, and where; not how much of what.
_KEPT = {
    "SLURM_CONF", "SLURM_JWT", "SBATCH_ACCOUNT", "SBATCH_CONSTRAINT", "SBATCH_PARTITION", "SBATCH_QOS",
    "SBATCH_RESERVATION", "SBATCH_WCKEY",
}  # fmt: skip
_OF_JOBS = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "PMI_", "PMIX_")
_RENAMED = {"array-inx": "array", "no-requeue": "requeue", "timelimit": "time"}  # SBATCH_* and their options


def check_options(extra: Mapping[str, Any], srun_args: Sequence[str]) -> None:
    """Refuse options that exp itself gives to sbatch and srun. Slurm also accepts the beginning of an option's name.

    Args:
        extra: ``launcher.extra``, further options of sbatch.
        srun_args: ``launcher.srun_args``, further arguments of srun.

    Raises:
        ConfigError: one of them is an option of exp's.
    """
    instead = {**{option: f"set {key}" for option, key in _KEYS.items()}, **_INTERNAL}
    options_by_key = [(f"launcher.extra.{name}", _option(str(name).lstrip("-")), tuple(instead)) for name in extra]
    for word in srun_args:
        name = word[2:].partition("=")[0] if word.startswith("--") else _SHORT.get(word[1:2], "")
        options_by_key += [(f"launcher.srun_args={word}", name, _OF_SRUN)] if word.startswith("-") and name else []
    for key, name, options in options_by_key:
        option = (
            name
            if name in options
            else next((option_name for option_name in options if option_name.startswith(name)), None)
        )
        if option is not None:
            raise ConfigError(
                f"{key} cannot be set: exp decides --{option} of its jobs; leave it out, {instead[option]}"
            )


def asks_for_cards(launcher: Any) -> bool:
    """Whether a job with these keys (:mod:`exp.launcher.slurm.keys`) gets cards: some, or whole nodes."""
    extra = {_option(str(name)) for name, value in launcher.extra.items() if value}
    here = {_option(name[len("SBATCH_") :]) for name in os.environ if name.startswith("SBATCH_")}
    return bool(launcher.gres or launcher.exclusive or {*_CARDS, "exclusive"} & (extra | here))


@contextlib.contextmanager
def environment_for(script: str, hidden: Iterable[str] = ()) -> Iterator[None]:
    """Context in which sbatch reads, and gives to the job, no variables that describe another job.

    If this process is part of a job, the variables of that job are left out, except :data:`_KEPT`: they say what its
    nodes, memory and tasks are. Otherwise ``SBATCH_*`` are the user's. They take precedence over the options in a
    script, so those whose option the script has, or that exp relies on, are left out with a warning.

    Args:
        script: the batch script.
        hidden: further variables that Slurm sets in a job, such as the list of its cards.
    """
    inside = any(name.startswith("SLURM_JOB") for name in os.environ)
    written = {_RENAMED.get(name, name) for name in re.findall(r"^#SBATCH --([\w-]+)", script, re.MULTILINE)}
    taken = {_memory(name) for name in written - {"wckey"}} | {*_INTERNAL}  # submitit writes a wckey of its own
    left_out = []
    for name in [*os.environ]:
        option = _option(name[len("SBATCH_") :]) if name.startswith("SBATCH_") else ""
        if name == "SLURM_CLUSTERS" or _memory(_RENAMED.get(option, option)) in taken:
            left_out.append(name)
            if not inside:
                console.warn(f"ignoring {name} from the environment: launcher=submitit sets this option of the job")
        elif inside and name not in _KEPT and (name.startswith(_OF_JOBS) or name in hidden):
            left_out.append(name)
    removed = {name: os.environ.pop(name) for name in left_out}
    try:
        yield
    finally:
        os.environ.update(removed)


def _option(name: str) -> str:
    return name.lower().replace("_", "-") if name.isupper() else name.replace("_", "-")


def _memory(option: str) -> str:
    """Options of memory exclude each other: the same name for all."""
    return "mem" if option.startswith("mem-per-") else option
