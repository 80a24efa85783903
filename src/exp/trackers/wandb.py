"""Weights & Biases; offline where there is no key."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Mapping, Sequence

from exp.trackers.base import TrackedRun, Tracker, final_metrics

__all__ = ["WandbTracker"]


@dataclass
class WandbTracker(Tracker):
    """A run for each run; those of a sweep are a group.

    Without a key (``WANDB_API_KEY``, or what ``wandb login`` has kept) it writes to ``trackers/wandb`` of the run
    folder, from where ``wandb sync`` sends it.

    Args:
        project: its name; None: the experiment's.
        entity: user or team; None: the user's default.
        mode: ``online``, ``offline``; None: ``WANDB_MODE``, else whether there is a key.
        tags: of the run.
    """

    project: str | None = None
    entity: str | None = None
    mode: str | None = None
    tags: Sequence[str] = ()

    requires: ClassVar[Sequence[str]] = ["wandb"]

    def open(self, run: TrackedRun, known: str | None) -> str:
        """Continues a run that is known."""
        os.environ.setdefault("WANDB_SILENT", "true")  # the terminal is the run's
        import wandb

        folder, name = run.folder / "trackers", known or uuid.uuid4().hex[:12]
        mode = self.mode or os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        self._run = wandb.init(
            project=self.project or run.experiment,
            entity=self.entity,
            id=name,
            resume="allow",
            name=run.name,
            group=run.facts.get("sweep"),
            config=dict(run.keys),
            tags=[*self.tags, run.facts["backend"], run.facts["task"]],
            dir=str(folder),
            mode=mode,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True, init_timeout=60
            ),
        )
        self._run.define_metric("*", step_metric="step")
        self.address = self._run.url if mode == "online" else f"wandb sync {folder / 'wandb'}/offline-run-*-{name}"
        return name

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Beside ``step``, which is the axis: W&B's own counter only ever goes up."""
        self._run.log({**values, "step": step})

    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """With files, pictures, and the final metrics in the summary."""
        import wandb

        for file in files:
            if file.name != "config.yaml":  # W&B writes one of its own, and would do it through the link to ours
                self._run.save(str(file), base_path=str(file.parent), policy="now")
        shown = {f"plots/{picture.stem}": wandb.Image(str(picture)) for picture in pictures}
        if shown:
            self._run.log({**shown, "step": int(result.get("steps") or 0)})
        self._run.summary.update({**final_metrics(result), "metric": result.get("metric"), "status": status})
        self._run.finish(exit_code=0 if status == "completed" else 1)


def _has_key() -> bool:
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
    logins = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return bool(os.environ.get("WANDB_API_KEY")) or (logins.is_file() and server in logins.read_text())
