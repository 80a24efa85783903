"""SwanLab; offline where there is no key."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Mapping, Sequence

from exp.trackers import AccountTracker, TrackedRun, final_metrics

__all__ = ["SwanlabTracker"]


@dataclass
class SwanlabTracker(AccountTracker):
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

        folder = run.folder / "trackers" / "swanlab"
        folder.mkdir(exist_ok=True)
        has_key = bool(os.environ.get("SWANLAB_API_KEY")) or (Path.home() / ".swanlab" / ".netrc").is_file()
        mode = self.mode or os.environ.get("SWANLAB_MODE") or ("online" if has_key else "offline")
        name = self.begin(swanlab.init, run, known, mode=mode, workspace=self.workspace, log_dir=str(folder))
        # Asked for a page where there is none, the client raises.
        self.address = str(self._run.url) if mode == "online" else f"swanlab sync {folder}/run-*-{name}"
        return name

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
