"""The keys of ``launcher=submitit``: what is asked of Slurm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from exp.config.schema import LauncherConfig

__all__ = ["SubmititConfig"]

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class SubmititConfig(LauncherConfig):
    """A job on Slurm, by way of submitit (:class:`exp.launcher.submitit.SubmititLauncher`); see sbatch(1)."""

    cluster: str = "slurm"
    """``slurm``; ``local``: a process on this machine that outlives this one; ``debug``: in this process."""
    nodes: int = 1
    """Nodes of one run, with ``nproc`` workers each."""
    partition: Optional[str] = None
    account: Optional[str] = None
    qos: Optional[str] = None
    time_minutes: int = 60
    """Time limit of a job. One that reaches it saves its state and is queued again."""
    gres: Optional[str] = None
    """Generic resources of each node, such as ``gpu:8``."""
    gpus_per_node: Optional[int] = None
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
    """Further options of sbatch: their names without dashes in front, and true for those without a value."""
    srun_args: List[str] = field(default_factory=list)
    """Further arguments of srun, which starts the task of each node."""
    signal_delay_s: int = 90
    """How long before the time limit a run is told to save its state."""
    max_requeues: int = 100
    """How often a job is queued again before it counts as failed."""
    array_parallelism: int = 256
    """Jobs of a sweep that run at a time."""
    wait: bool = True
    """Follow the job to its end; false: only submit it."""
    cancel_on_exit: bool = False
    """Ctrl-C, while it waits, cancels the job; otherwise it goes on."""
    dry_run: bool = False
    """Only print the batch script."""
    poll_s: float = 2.0
    """Seconds between two looks at the queue."""
