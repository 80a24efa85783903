"""Trackers whose users have accounts, with projects: Weights & Biases and SwanLab; offline where there is no key."""

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
    """A run for each run; those of a sweep are a group.

    Args:
        project: its name; None: the experiment's.
        mode: the client's, such as ``online`` and ``offline``; None: its variable, else whether there is a key.
        tags: of the run.
    """

    project: str | None = None
    mode: str | None = None
    tags: Sequence[str] = ()

    def _begin(self, client: Any, run: TrackedRun, known: str | None, logged_in: bool, place: str, **more: Any) -> str:
        """Begin the run, or continue it; ``place`` is the folder of an offline run, up to the name."""
        client_name = client.__name__
        name, has_key = known or uuid.uuid4().hex[:12], logged_in or os.environ.get(f"{client_name.upper()}_API_KEY")
        mode = self.mode or os.environ.get(f"{client_name.upper()}_MODE") or ("online" if has_key else "offline")
        about: dict[str, Any] = {"name": run.name, "group": run.facts.get("sweep"), "config": dict(run.keys)}
        about["tags"] = [*self.tags, run.facts["backend"], run.facts["task"]]
        project = (self.project or run.experiment).replace("/", "-")
        self._run = client.init(project=project, id=name, resume="allow", mode=mode, **about, **more)
        # Asked for a page where there is none, SwanLab's raises.
        self.address = str(self._run.url) if mode == "online" else f"{client_name} sync {place}-*-{name}"
        return name


@dataclass
class WandbTracker(_AccountTracker):
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
        logged_in = logins.is_file() and server in logins.read_text()
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        more = {"entity": self.entity, "dir": str(folder), "settings": settings}
        name = self._begin(wandb, run, known, logged_in, f"{folder}/wandb/offline-run", **more)
        self._run.define_metric("*", step_metric="step")
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


@dataclass
class SwanlabTracker(_AccountTracker):
    """Without a key (``SWANLAB_API_KEY``, or what ``swanlab login`` has kept) it writes to ``trackers/swanlab`` of the
    run folder, from where ``swanlab sync`` sends it.

    Args:
        workspace: user or organization; None: the user's default.
    """

    workspace: str | None = None

    requires: ClassVar[Sequence[str]] = ["swanlab"]

    def open(self, run: TrackedRun, known: str | None) -> str:
        """Continues a run that is known."""
        import swanlab

        folder, logged_in = run.folder / "trackers" / "swanlab", (Path.home() / ".swanlab" / ".netrc").is_file()
        folder.mkdir(exist_ok=True)
        more = {"workspace": self.workspace, "log_dir": str(folder)}
        return self._begin(swanlab, run, known, logged_in, f"{folder}/run", **more)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Scalars."""
        self._run.log(dict(values), step=step)

    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """With the pictures and the final metrics."""
        import swanlab

        final: dict[str, Any] = {f"plots/{path.stem}": swanlab.Image(str(path)) for path in pictures}
        final.update(final_metrics(result, "final/"))
        if final:
            self._run.log(final, step=int(result.get("steps") or 0))
        self._run.finish(**({} if status == "completed" else {"state": "crashed", "error": status}))
