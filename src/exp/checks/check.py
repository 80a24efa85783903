"""What a check answers, the journal that holds its answers at any moment, and how answers are shown. No torch."""

from __future__ import annotations

import faulthandler
import json
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Iterable, Mapping, Sequence

from exp import console
from exp.errors import EXIT_FAILED, EXIT_OK, RunError
from exp.report.tables import Table, as_rich
from exp.runs.files import read_json, to_json
from exp.runs.record import blank_result

if TYPE_CHECKING:
    from pathlib import Path

    from exp.config.schema import ExpConfig
    from exp.runs.folder import RunFolder

__all__ = ["FAILED", "OK", "SKIPPED", "WARNING", "Answer", "Journal", "fail", "figure", "finish", "ok", "read_journal",
           "say", "skip", "table_of", "why_ended", "worst"]  # fmt: skip

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
_STYLES = {OK: "green", WARNING: "yellow", FAILED: "bold red", SKIPPED: "dim"}
_STDERR = 2  # the descriptor, which native code writes to, too: it leads to the log of the rank


@dataclass
class Answer:
    """What a check has found.

    Attributes:
        status: ``ok``, ``warning``, ``failed`` or ``skipped``.
        finding: why, in one line.
        advice: what to do; empty: nothing.
        values: figures, by name; ``table``, where there is one, is a list of rows with equal keys.
        seconds: that it took; None: it was not made, or is one of several.
    """

    status: str
    finding: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None


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


def figure(value: float) -> float | str:
    """A number of a table, with two digits; ``inf`` as text, which JSON has no number for."""
    return float(f"{value:.1e}") if math.isfinite(value) else str(value)


class Journal:
    """Lines of JSON, written before the next thing happens: after a crash, the last one names the culprit.

    What takes longer than its limit ends the process, with its stack on stderr: faulthandler's thread does that, and
    does not need the interpreter's lock, which a hanging driver may hold.

    Args:
        path: the file; begun anew. It is opened for each line, so that other nodes see it.
        limit_s: longest time from :meth:`begin` to :meth:`end`, in seconds.

    Attributes:
        crashed: names of what has ended the process before, where the file ends with such a crash. The file keeps them.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        self.path, self._limit_s = path, limit_s
        lines, _ = read_journal(path)
        kept = [line for line in lines if "crash" in line] if lines and "crash" in lines[-1] else []
        self.crashed = {line["name"] for line in kept}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        for line in kept:
            self.note(path, **line)

    def begin(self, name: str, **about: Any) -> None:
        """Something is about to be tried."""
        self.note(self.path, ended=False, name=name, **about, since=time.time())
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=_STDERR)

    def end(self, name: str, **found: Any) -> None:
        """It has ended, well or not."""
        faulthandler.cancel_dump_traceback_later()
        self.note(self.path, name=name, **found)

    @staticmethod
    def note(path: Path, ended: bool = True, **line: Any) -> None:
        """Add a line to the journal of any process."""
        with path.open("a", encoding="utf-8") as file:
            file.write(to_json({**line, "ended": ended}) + "\n")


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


def why_ended(begun: Mapping[str, Any], message: str | None, limit_s: float, now: float) -> str | None:
    """How a process ended in something that had only begun; None: nothing is known.

    Args:
        begun: of :func:`read_journal`.
        message: of the rank's failure; None: it has none.
        limit_s: of the journal.
        now: seconds since the epoch when the job had ended.
    """
    if now - begun["since"] >= limit_s:
        return f"hung: no end within {limit_s:g} s"
    return message.splitlines()[0] if message else None


def finish(
    config: ExpConfig, folder: RunFolder, answer: Answer, styles: Sequence[str] = (), said: Sequence[Answer] = (),
    **known: Any,
) -> int:  # fmt: skip
    """Print the answer of a task, and record it in ``result.json``.

    Args:
        config: of the run.
        folder: of the run.
        answer: goes into the key ``answer``.
        styles: statuses of the rows of its table, by which they are colored; empty: all alike.
        said: what it consists of, printed in place of it.
        **known: further keys.

    Returns:
        The exit code.
    """
    table = table_of(answer.values, [_STYLES[status] for status in styles])
    if table is not None:  # first: the disk may be what is complained of
        console.make_console().print("\n", as_rich(table), sep="")
    for each in said or [answer]:
        say(each.status, each.finding, each.advice)
    console.make_console().print(f"run folder: {console.shown(folder.path)}", soft_wrap=True, markup=False)
    failed = answer.status == FAILED
    message = f"{answer.finding}; {answer.advice}" if answer.advice else answer.finding
    result = {**(read_json(folder.result) or blank_result(config)), "status": "failed" if failed else "completed"}
    error = {"error": {"rank": None, "type": RunError.__name__, "message": message}} if failed else {}
    folder.write_result({**result, **error, **known, "answer": answer.__dict__})
    return EXIT_FAILED if failed else EXIT_OK


def say(status: str, text: str, advice: str = "") -> None:
    """Print a finding, after its status in color."""
    terminal = console.make_console()
    terminal.print(status, style=_STYLES[status], end="")
    terminal.print(f": {text}" + f"\n  do: {advice}" * bool(advice), soft_wrap=True, markup=False)


def table_of(values: Mapping[str, Any], styles: Sequence[str] = ()) -> Table | None:
    """The table of an answer's values, without what is equal in it; None: it has none."""
    rows = [row for row in values.get("table", ()) if row.get("status") != "equal"]
    return Table.of(rows, styles) if rows else None
