"""Weights & Biases; offline where there is no key."""

from __future__ import annotations

import netrc
import os
import uuid
from pathlib import Path
from typing import Any, ClassVar, Mapping, Sequence

from exp.trackers.base import TrackedRun, final_metrics
from exp.trackers.hosted import HostedTracker

__all__ = ["WandbTracker"]


class WandbTracker(HostedTracker):
    """A run for each run; those of a sweep are a group.

    Without a key (``WANDB_API_KEY``, or what ``wandb login`` has kept) it writes to ``trackers/wandb`` of the run
    folder, from where ``wandb sync`` sends it.

    Args:
        project: its name; None: the experiment's.
        entity: user or team; None: the user's default.
        mode: ``online``, ``offline``; None: ``WANDB_MODE``, else whether there is a key.
        tags: of the run.
    """

    mode_variable: ClassVar[str] = "WANDB_MODE"
    requires: ClassVar[Mapping[str, str]] = {"wandb": "wandb"}

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        mode: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        super().__init__(project, entity, mode, tags)

    def has_key(self) -> bool:
        """Whether there is a key without asking for one."""
        if os.environ.get("WANDB_API_KEY"):
            return True
        try:
            hosts = netrc.netrc().hosts
        except (OSError, netrc.NetrcParseError):
            return False
        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
        return server in hosts

    def open(self, run: TrackedRun, known: str | None) -> str:
        """One that is known goes on."""
        import wandb

        folder = run.folder / "trackers"
        folder.mkdir(exist_ok=True)
        name = known or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=self.project or run.experiment,
            entity=self.owner,
            id=name,
            resume="allow",
            reinit="finish_previous",  # after an attempt that has failed halfway
            name=run.name,
            group=run.sweep.name if run.sweep else None,
            config=dict(run.keys),
            notes=None,
            tags=self.tags_of(run),
            dir=str(folder),
            mode=self.chosen_mode(),
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True, init_timeout=60
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._address = self._run.url or f"wandb sync {folder / 'wandb'}/offline-run-*-{name}"
        return name

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Beside ``step``, which is the axis: W&B's own counter only ever goes up."""
        self._run.log({**values, "step": step})

    def keep_files(self, files: Sequence[Path]) -> None:
        """In the run's files; not ``config.yaml``, where W&B writes one of its own, and through the link to ours."""
        for file in files:
            if file.name != "config.yaml":
                self._run.save(str(file), base_path=str(file.parent), policy="now")

    def keep_pictures(self, pictures: Sequence[Path], step: int) -> None:
        """As media."""
        import wandb

        shown = {f"plots/{picture.stem}": wandb.Image(str(picture)) for picture in pictures}
        if shown:
            self._run.log({**shown, "step": step})

    def close(self, status: str, result: Mapping[str, Any]) -> None:
        """With the final metrics in the summary."""
        self._run.summary.update({**final_metrics(result), "metric": result.get("metric"), "status": status})
        self._run.finish(exit_code=0 if status == "completed" else 1)
