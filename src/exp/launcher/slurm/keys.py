"""The typed keys of ``launcher=submitit``. Imports neither torch nor submitit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from exp.config.schema import LauncherConfig

__all__ = ["SubmititConfig"]

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class SubmititConfig(LauncherConfig):
    """A job on Slurm, by submitit (:class:`exp.launcher.slurm.launcher.SubmititLauncher`); see sbatch(1)."""

    cluster: str = "slurm"
    """``slurm``; ``debug`` (or ``local``): in this process, without Slurm."""
    nodes: int = 1
    """Nodes of one run, with ``nproc`` workers each."""
    partition: Optional[str] = None
    account: Optional[str] = None
    qos: Optional[str] = None
    time_minutes: int = 60
    """Time limit of a job, in minutes. A job that reaches it saves its state and is queued again."""
    gres: Optional[str] = None
    """Generic resources of each node, such as ``gpu:8``."""
    cpus_per_node: Optional[int] = None
    mem_gib: Optional[float] = None
    """Memory of each node, in GiB."""
    constraint: Optional[str] = None
    nodelist: Optional[str] = None
    exclude: Optional[str] = None
    exclusive: bool = False
    """Share no node with other jobs."""
    job_name: Optional[str] = None
    """null: the experiment's name."""
    setup: List[str] = field(default_factory=list)
    """Lines of the batch script before the workers start, such as ``module load ...``."""
    extra: Dict[str, Any] = field(default_factory=dict)
    """Further options of sbatch: names without leading dashes; true for an option without a value."""
    srun_args: List[str] = field(default_factory=list)
    """Further arguments of srun, which starts the task of each node."""
    signal_delay_s: int = 90
    """Seconds before the time limit at which Slurm sends the preemption signal, so that the run saves its state."""
    max_requeues: int = 100
    """How often a job is queued again before it counts as failed."""
    array_parallelism: int = 256
    """Largest number of jobs of a sweep that run at the same time."""
    dry_run: bool = False
    """Only print the batch script."""
    poll_s: float = 2.0
    """Seconds between two queries of the queue."""
