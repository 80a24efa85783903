"""What a tracker has been told of a run, in ``trackers/<name>.json`` of its folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from exp.runfolder import read_json, write_json

__all__ = ["State"]


@dataclass
class State:
    """Of one tracker and one run.

    Attributes:
        path: of the file.
        run_id: what the tracker knows the run by; None: it has not begun there.
        address: where a person finds it.
        sent: by split, the last step that has arrived.
        closed: whether the end has arrived, too.
        trouble: why something has not arrived, in one line.
    """

    path: Path
    run_id: str | None = None
    address: str = ""
    sent: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    trouble: str | None = None

    @classmethod
    def of(cls, folder: Path, name: str) -> State:
        """The state in a run folder; a new one where there is none."""
        path = folder / "trackers" / f"{name}.json"
        return cls(path, **(read_json(path) or {}))

    def write(self) -> None:
        """Write it down; a folder that has gone is no trouble of the tracker's."""
        content = asdict(self)
        del content["path"]
        if self.path.parent.parent.is_dir():
            write_json(self.path, content)
