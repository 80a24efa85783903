"""SwanLab; offline where there is no key."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Mapping, Sequence

from exp.trackers.base import TrackedRun, Tracker, final_metrics

__all__ = ["SwanlabTracker"]


@dataclass
class SwanlabTracker(Tracker):
    """An experiment of SwanLab's for each run; those of a sweep are a group.

    Without a key (``SWANLAB_API_KEY``, or what ``swanlab login`` has kept) it writes to ``trackers/swanlab`` of the run
    folder, from where ``swanlab sync`` sends it.

    Args:
        project: its name; None: the experiment's.
        workspace: user or organization; None: the user's default.
        mode: ``online``, ``local``, ``offline``; None: ``SWANLAB_MODE``, else whether there is a key.
        tags: of the run.
    """

    project: str | None = None
    workspace: str | None = None
    mode: str | None = None
    tags: Sequence[str] = ()

    requires: ClassVar[Sequence[str]] = ["swanlab"]

    def open(self, run: TrackedRun, known: str | None) -> str:
        """Continues a run that is known."""
        import swanlab

        folder, name = run.folder / "trackers" / "swanlab", known or uuid.uuid4().hex[:16]
        folder.mkdir(exist_ok=True)
        has_key = bool(os.environ.get("SWANLAB_API_KEY")) or (Path.home() / ".swanlab" / ".netrc").is_file()
        mode = self.mode or os.environ.get("SWANLAB_MODE") or ("online" if has_key else "offline")
        self._run = swanlab.init(
            project=(self.project or run.experiment).replace("/", "-"),
            workspace=self.workspace,
            name=run.name,
            group=run.facts.get("sweep"),
            tags=[*self.tags, run.facts["backend"], run.facts["task"]],
            config=dict(run.keys),
            log_dir=str(folder),
            mode=mode,
            id=name,
            resume="allow",
        )
        # Asked for a page where there is none, the client raises.
        self.address = str(self._run.url) if mode == "online" else f"swanlab sync {folder}/run-*-{name}"
        return name

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Scalars."""
        self._run.log(dict(values), step=step)

    def close(self, status: str, result: Mapping[str, Any], files: Sequence[Path], pictures: Sequence[Path]) -> None:
        """With the pictures and the final metrics."""
        import swanlab

        final: dict[str, Any] = {f"plots/{picture.stem}": swanlab.Image(str(picture)) for picture in pictures}
        final.update(final_metrics(result, "final/"))
        if final:
            self._run.log(final, step=int(result.get("steps") or 0))
        self._run.finish(**({} if status == "completed" else {"state": "crashed", "error": status}))
