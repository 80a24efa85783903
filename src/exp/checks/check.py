"""What a check answers, and the journal that holds it at any moment. Imports no torch."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Iterable, Mapping, Sequence

from exp.runs.files import to_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FAILED", "OK", "SKIPPED", "STYLES", "WARNING", "Answer", "Journal", "fail", "ok", "read_journal", "skip",
           "table_of", "worst"]  # fmt: skip

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
STYLES = {OK: "green", WARNING: "yellow", FAILED: "bold red", SKIPPED: "dim"}


@dataclass
class Answer:
    """What a check has found.

    Attributes:
        status: ``ok``, ``warning``, ``failed`` or ``skipped``.
        finding: why, in one line.
        advice: what to do; empty: nothing.
        values: figures, by name; ``table``, where there is one, is a list of rows with equal keys.
    """

    status: str
    finding: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def ok(finding: str, advice: str = "", **values: Any) -> Answer:
    """A check that did not fail; with advice it is a warning."""
    return Answer(WARNING if advice else OK, finding, advice, values)


def fail(finding: str, advice: str, **values: Any) -> Answer:
    """A check that failed, and what to do about it."""
    return Answer(FAILED, finding, advice, values)


def skip(reason: str, advice: str = "") -> Answer:
    """A check that was not made."""
    return Answer(SKIPPED, reason, advice)


def worst(statuses: Iterable[str]) -> str:
    """Failed before warning before ok; skipped where there is none of them."""
    found = set(statuses)
    return next((each for each in (FAILED, WARNING, OK) if each in found), SKIPPED)


class Journal:
    """Lines of JSON, written before the next thing happens: after a crash, the last one names the culprit.

    Args:
        path: the file; begun anew. It is opened for each line, so that other nodes see it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")

    def begin(self, name: str, **about: Any) -> None:
        """Something is about to be tried."""
        self._write({"name": name, **about, "since": time.time(), "ended": False})

    def end(self, name: str, **found: Any) -> None:
        """It has ended, well or not."""
        self._write({"name": name, **found, "ended": True})

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")


def read_journal(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """What has ended, in order, and what had only begun; None: nothing had."""
    ended, begun = [], None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # cut off
        if found.pop("ended"):
            ended.append(found)
            begun = None
        else:
            begun = found
    return ended, begun


def table_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of equal keys as lines of Markdown, with an empty one at the end."""
    cells = [[_cell(value) for value in row.values()] for row in rows]
    heads = [[*rows[0]], ["---"] * len(rows[0])] if rows else []
    return [*(f"| {' | '.join(line)} |" for line in [*heads, *cells]), ""]


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.1e}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
