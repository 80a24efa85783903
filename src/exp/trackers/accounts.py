"""Trackers with user accounts and projects: Weights & Biases and SwanLab. Without an API key they work offline."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Mapping, Sequence

from exp.trackers import TrackedRun, Tracker, final_metrics

__all__ = ["SwanlabTracker", "WandbTracker"]


@dataclass
class _AccountTracker(Tracker):
    """Common part of both trackers. Runs of one sweep are a group at the tracker.

    Args:
        project: name of the project; None: name of the experiment.
        mode: mode of the client, such as ``online`` or ``offline``. None: ``WANDB_MODE`` or ``SWANLAB_MODE``; if it is
            not set, ``online`` if there is an API key, else ``offline``.
        tags: further tags of the run, besides backend and task.
    """

    project: str | None = None
    mode: str | None = None
    tags: Sequence[str] = ()

    def _begin(self, client: Any, run: TrackedRun, known: str | None, logged_in: bool, place: str, **more: Any) -> str:
        """Create the run or continue it; ``place`` is the path prefix of offline runs, for :attr:`address`."""
        client_name = client.__name__
        name, has_key = known or uuid.uuid4().hex[:12], logged_in or os.environ.get(f"{client_name.upper()}_API_KEY")
        mode = self.mode or os.environ.get(f"{client_name.upper()}_MODE") or ("online" if has_key else "offline")
        about: dict[str, Any] = {"name": run.name, "group": run.facts.get("sweep"), "config": dict(run.keys)}
        about["tags"] = [*self.tags, run.facts["backend"], run.facts["task"]]
        project = (self.project or run.experiment).replace("/", "-")
        self._run = client.init(project=project, id=name, resume="allow", mode=mode, **about, **more)
        # Only an online run has a URL; SwanLab's ``url`` raises otherwise.
        self.address = str(self._run.url) if mode == "online" else f"{client_name} sync {place}-*-{name}"
        return name


@dataclass
class WandbTracker(_AccountTracker):
    """Weights & Biases. Without an API key (``WANDB_API_KEY`` or ``wandb login``) it writes to ``trackers/wandb`` in
    the run folder; ``wandb sync`` uploads this later.

    Args:
        entity: user or team; None: the default of the account.
    """

    entity: str | None = None

    requires: ClassVar[Sequence[str]] = ["wandb"]

    def open(self, run: TrackedRun, known: str | None) -> str:
        """Create the run, or continue the known one."""
        os.environ.setdefault("WANDB_SILENT", "true")  # the run's own output must stay readable
        import wandb

        folder, logins = run.folder / "trackers", Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
        logged_in = logins.is_file() and server in logins.read_text()
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        more = {"entity": self.entity, "dir": str(folder), "settings": settings}
        name = self._begin(wandb, run, known, logged_in, f"{folder}/wandb/offline-run", **more)
        self._run.define_metric("*", step_metric="step")
        return name

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log scalars with the metric ``step`` as the x-axis, because W&B's own step counter cannot go back."""
        self._run.log({**values, "step": step})

    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """Upload files and pictures, write the final metrics to the summary, and end the run."""
        import wandb

        for file in files:
            if file.name != "config.yaml":  # W&B writes a file of this name, and would overwrite ours through a link
                self._run.save(str(file), base_path=str(file.parent), policy="now")
        if pictures:
            self.log({f"plots/{path.stem}": wandb.Image(str(path)) for path in pictures}, int(result.get("steps") or 0))
        self._run.summary.update({**final_metrics(result), "metric": result.get("metric"), "status": status})
        self._run.finish(exit_code=0 if status == "completed" else 1)


@dataclass
class SwanlabTracker(_AccountTracker):
    """SwanLab. Without an API key (``SWANLAB_API_KEY`` or ``swanlab login``) it writes to ``trackers/swanlab`` in the
    run folder; ``swanlab sync`` uploads this later.

    Args:
        workspace: user or organization; None: the default of the account.
    """

    workspace: str | None = None

    requires: ClassVar[Sequence[str]] = ["swanlab"]

    def open(self, run: TrackedRun, known: str | None) -> str:
        """Create the run, or continue the known one."""
        import swanlab

        folder, logged_in = run.folder / "trackers" / "swanlab", (Path.home() / ".swanlab" / ".netrc").is_file()
        folder.mkdir(exist_ok=True)
        more = {"workspace": self.workspace, "log_dir": str(folder)}
        return self._begin(swanlab, run, known, logged_in, f"{folder}/run", **more)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log scalars."""
        self._run.log(dict(values), step=step)

    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """Upload the pictures and the final metrics, and end the run."""
        import swanlab

        final: dict[str, Any] = {f"plots/{path.stem}": swanlab.Image(str(path)) for path in pictures}
        final.update(final_metrics(result, "final/"))
        if final:
            self._run.log(final, step=int(result.get("steps") or 0))
        self._run.finish(**({} if status == "completed" else {"state": "crashed", "error": status}))
