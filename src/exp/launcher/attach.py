"""A submitted job is followed again: by the same command, or by ``task=attach run=<folder>``.

What it takes lies in the run folder: ``logs/job.json``, written when the job was submitted, and the lock, which the
job has as long as it lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from omegaconf import ListConfig

from exp import console, summary
from exp.errors import ConfigError
from exp.frozen import FrozenRun
from exp.launcher import slurm
from exp.launcher.follow import Followed, follow
from exp.launcher.status import StatusLine
from exp.lock_holder import Holder, holder_of, is_running
from exp.runfolder import RunFolder, read_json, write_json
from exp.runlock import RunLock

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.summary import Finished

__all__ = ["attach", "attach_to", "remember", "the_same"]

_NOT_COMPARED = ("launcher", "output_dir", "overwrite", "resume")


@dataclass
class _Job:
    """A job of an earlier command, with what :class:`exp.launcher.follow.Followed` asks of submitit's."""

    holder: Holder

    @property
    def job_id(self) -> str:
        return self.holder.job

    @property
    def state(self) -> str:
        """Of a process of this machine."""
        return "RUNNING" if is_running(self.holder) else "FINISHED"

    def cancel(self, check: bool = False) -> None:
        del check
        if self.holder.cluster == "slurm":
            slurm.cancel([self.job_id])
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.holder.pid, signal.SIGINT)


def _record(folder: RunFolder) -> Path:
    return folder.logs / "job.json"


def remember(folder: RunFolder, lock: RunLock | None, job: Any, cluster: str, logs: Path) -> None:
    """Leave word of a job that has just been submitted, and let it have the lock of its run folder.

    Args:
        folder: the run folder.
        lock: of this process.
        job: submitit's.
        cluster: ``slurm`` or ``local``.
        logs: where the job prints to.
    """
    pid = int(job.job_id) if cluster == "local" else None  # submitit's local jobs are called as their processes
    token = lock.token if lock is not None else ""
    holder = Holder.me(token, str(job.job_id), cluster, pid=pid)
    write_json(_record(folder), {"logs": str(logs), "holder": asdict(holder)})
    if lock is not None:
        lock.hand_to(holder)


def the_same(run: FrozenRun, folder: RunFolder) -> bool:
    """Whether a command is the one that made the run in ``folder``, as far as what it computes goes."""
    return _given(run.overrides) == _given(FrozenRun.load(folder).overrides)


def _given(overrides: Sequence[str]) -> list[str]:
    return sorted(each for each in overrides if each.lstrip("+~").partition("=")[0].split(".")[0] not in _NOT_COMPARED)


def attach(config: ExpConfig) -> Finished:
    """``task=attach``: follow the job whose run folder is ``run``.

    Raises:
        ConfigError: there is none.
    """
    if config.run is None or isinstance(config.run, ListConfig):
        raise ConfigError("task=attach needs run=<the run folder of a submitted job>")
    return attach_to(RunFolder(Path(str(config.run)).expanduser()))


def attach_to(folder: RunFolder) -> Finished:
    """Follow the job of a run folder to its end, and tell that as the command would have that submitted it.

    Raises:
        ConfigError: the folder is no submitted job's, or its process is on another machine.
    """
    shown = console.shown(folder.path)
    holder = holder_of(folder.path)
    if holder is not None and not holder.job:
        raise ConfigError(f"{shown} is no submitted job's: {holder} runs it; wait for its end")
    written = read_json(_record(folder)) or {}
    if holder is None:
        if not written:
            raise ConfigError(f"run={shown} holds no submitted job; attach follows those of launcher=submitit")
        holder = Holder(**written["holder"])
    if holder.cluster == "local" and not holder.is_here():
        raise ConfigError(f"the job of {shown} is a process of {holder.host}; give this command there")
    logs = Path(written.get("logs", folder.path / "slurm"))
    run = FrozenRun.load(folder, of_others=True)
    settings, on_slurm = run.config.launcher, holder.cluster == "slurm"
    followed = Followed(_Job(holder), folder, logs)
    with StatusLine() as status:
        status.say(f"following {'job' if on_slurm else 'process'} {holder.job} of {shown}")
        outcome = follow([followed], status, settings.poll_s, settings.cancel_on_exit, on_slurm)[0]
    if not outcome.left:
        RunLock(folder.path, holder.token).release(ended=True)
    return summary.end(run.config, folder, outcome)
