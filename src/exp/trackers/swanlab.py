"""SwanLab; offline where there is no key."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any, ClassVar, Mapping, Sequence

from exp.trackers.base import TrackedRun, Tracker, final_metrics, tags_of

__all__ = ["SwanlabTracker"]


class SwanlabTracker(Tracker):
    """An experiment of SwanLab's for each run; those of a sweep are a group.

    Without a key (``SWANLAB_API_KEY``, or what ``swanlab login`` has kept) it writes to ``trackers/swanlab`` of the run
    folder, from where ``swanlab sync`` sends it.

    Args:
        project: its name; None: the experiment's.
        workspace: user or organisation; None: the user's default.
        mode: ``online``, ``local``, ``offline``; None: ``SWANLAB_MODE``, else whether there is a key.
        tags: of the run.
    """

    requires: ClassVar[Mapping[str, str]] = {"swanlab": "swanlab"}

    def __init__(
        self,
        project: str | None = None,
        workspace: str | None = None,
        mode: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self.project, self.workspace, self.mode, self.tags = project, workspace, mode, tags
        self._run: Any = None

    def open(self, run: TrackedRun, known: str | None) -> str:
        """Continues a run that is known."""
        import swanlab

        folder = run.folder / "trackers" / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        name = known or uuid.uuid4().hex[:16]
        has_key = bool(os.environ.get("SWANLAB_API_KEY")) or (Path.home() / ".swanlab" / ".netrc").is_file()
        mode = self.mode or os.environ.get("SWANLAB_MODE") or ("online" if has_key else "offline")
        self._run = swanlab.init(
            project=(self.project or run.experiment).replace("/", "-"),
            workspace=self.workspace,
            name=run.name,
            group=run.facts.get("sweep"),
            tags=tags_of(run, self.tags),
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
