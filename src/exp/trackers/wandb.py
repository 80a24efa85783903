"""Weights & Biases; offline where there is no key."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Mapping, Sequence

from exp.trackers import AccountTracker, TrackedRun, final_metrics

__all__ = ["WandbTracker"]


@dataclass
class WandbTracker(AccountTracker):
    """Without a key (``WANDB_API_KEY``, or what ``wandb login`` has kept) it writes to ``trackers/wandb`` of the run
    folder, from where ``wandb sync`` sends it.

    Args:
        entity: user or team; None: the user's default.
    """

    entity: str | None = None

    requires: ClassVar[Sequence[str]] = ["wandb"]

    def open(self, run: TrackedRun, known: str | None) -> str:
        """Continues a run that is known."""
        os.environ.setdefault("WANDB_SILENT", "true")  # the terminal is the run's
        import wandb

        folder, logins = run.folder / "trackers", Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
        has_key = bool(os.environ.get("WANDB_API_KEY")) or (logins.is_file() and server in logins.read_text())
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        mode = self.mode or os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
        more = {"entity": self.entity, "dir": str(folder), "settings": settings}
        name = self.begin(wandb.init, run, known, mode=mode, **more)
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
        if pictures:
            self.log({f"plots/{path.stem}": wandb.Image(str(path)) for path in pictures}, int(result.get("steps") or 0))
        self._run.summary.update({**final_metrics(result), "metric": result.get("metric"), "status": status})
        self._run.finish(exit_code=0 if status == "completed" else 1)
