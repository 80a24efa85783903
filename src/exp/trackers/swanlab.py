"""SwanLab; offline where there is no key."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any, ClassVar, Mapping, Sequence

from exp.trackers.base import TrackedRun, final_metrics
from exp.trackers.hosted import HostedTracker

__all__ = ["SwanlabTracker"]


class SwanlabTracker(HostedTracker):
    """An experiment of SwanLab's for each run; those of a sweep are a group.

    Without a key (``SWANLAB_API_KEY``, or what ``swanlab login`` has kept) it writes to ``trackers/swanlab`` of the run
    folder, from where ``swanlab sync`` sends it.

    Args:
        project: its name; None: the experiment's.
        workspace: user or organisation; None: the user's default.
        mode: ``online``, ``local``, ``offline``; None: ``SWANLAB_MODE``, else whether there is a key.
        tags: of the run.
    """

    mode_variable: ClassVar[str] = "SWANLAB_MODE"
    requires: ClassVar[Mapping[str, str]] = {"swanlab": "swanlab"}

    def __init__(
        self,
        project: str | None = None,
        workspace: str | None = None,
        mode: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        super().__init__(project, workspace, mode, tags)

    def has_key(self) -> bool:
        """By its variable, or of ``swanlab login``."""
        return bool(os.environ.get("SWANLAB_API_KEY")) or (Path.home() / ".swanlab" / ".netrc").is_file()

    def open(self, run: TrackedRun, known: str | None) -> str:
        """One that is known goes on."""
        import swanlab

        folder = run.folder / "trackers" / "swanlab"
        folder.mkdir(parents=True, exist_ok=True)
        name = known or uuid.uuid4().hex[:16]
        mode = self.chosen_mode()
        self._run = swanlab.init(
            project=(self.project or run.experiment).replace("/", "-"),
            workspace=self.owner,
            name=run.name,
            group=run.sweep.name if run.sweep else None,
            tags=self.tags_of(run),
            config=dict(run.keys),
            log_dir=str(folder),
            mode=mode,
            id=name,
            resume="allow",
            reinit=True,  # after an attempt that has failed halfway
        )
        # Asked for a page where there is none, the client raises.
        self._address = str(self._run.url) if mode == "online" else f"swanlab sync {folder}/run-*-{name}"
        return name

    def log(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Scalars."""
        self._run.log(dict(values), step=step)

    def keep_pictures(self, pictures: Sequence[Path], step: int) -> None:
        """As media."""
        import swanlab

        shown = {f"plots/{picture.stem}": swanlab.Image(str(picture)) for picture in pictures}
        if shown:
            self._run.log(shown, step=step)

    def close(self, status: str, result: Mapping[str, Any]) -> None:
        """With the final metrics."""
        final = final_metrics(result, "final/")
        if final:
            self._run.log(final, step=int(result.get("steps") or 0))
        self._run.finish(**({} if status == "completed" else {"state": "crashed", "error": status}))
