"""What a check answers, the journal that holds its answers at any moment, and how answers are shown. No torch."""

from __future__ import annotations

import faulthandler
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Iterable, Mapping, Sequence

from exp import console
from exp.errors import EXIT_FAILED, EXIT_OK, RunError
from exp.report.tables import Column, Table, as_rich
from exp.runs.files import read_json, to_json
from exp.runs.record import blank_result

if TYPE_CHECKING:
    from pathlib import Path

    from exp.config.schema import ExpConfig
    from exp.runs.folder import RunFolder

__all__ = ["FAILED", "OK", "SKIPPED", "STYLES", "WARNING", "Answer", "Journal", "as_table", "fail", "finish", "ok",
           "read_journal", "show_answer", "show_table", "skip", "why_ended", "worst"]  # fmt: skip

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
STYLES = {OK: "green", WARNING: "yellow", FAILED: "bold red", SKIPPED: "dim"}
_STDERR = 2  # the descriptor, which native code writes to, too: it leads to the log of the rank


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
        return f"hung in '{begun['name']}': no end within {limit_s:g} s"
    return f"{message.splitlines()[0]} in '{begun['name']}'" if message else None


def finish(config: ExpConfig, folder: RunFolder, answer: Answer, **known: Any) -> int:
    """Record the answer of a task in ``result.json``.

    Args:
        config: of the run.
        folder: of the run.
        answer: goes into the key ``answer``.
        **known: further keys.

    Returns:
        The exit code.
    """
    failed = answer.status == FAILED
    result = {**(read_json(folder.result) or blank_result(config)), "status": "failed" if failed else "completed"}
    message = f"{answer.finding}; {answer.advice}" if answer.advice else answer.finding
    error = {"error": {"rank": None, "type": RunError.__name__, "message": message}} if failed else {}
    folder.write_result({**result, **error, **known, "answer": answer.__dict__})
    return EXIT_FAILED if failed else EXIT_OK


def show_answer(folder: RunFolder, answer: Answer) -> None:
    """Print an answer with its table, without what is equal in it."""
    terminal = console.make_console()
    show_table([row for row in answer.values.get("table", ()) if row.get("status") != "equal"])
    terminal.print(f"{answer.status}: ", style=STYLES[answer.status], end="")
    advice = f"\n  do: {answer.advice}" if answer.advice else ""
    terminal.print(f"{answer.finding}{advice}\nrun folder: {console.shown(folder.path)}", soft_wrap=True, markup=False)


def show_table(rows: Sequence[Mapping[str, Any]], styles: Sequence[str] = ()) -> None:
    """Print rows of equal keys, each in its style; empty: all alike."""
    if rows:
        terminal = console.make_console()
        terminal.print()
        terminal.print(as_rich(as_table(rows, styles)))


def as_table(rows: Sequence[Mapping[str, Any]], styles: Sequence[str] = ()) -> Table:
    """Rows of equal keys, without columns that are empty; figures stand to the right."""
    columns = []
    for title in rows[0]:
        cells = [_cell(row[title]) for row in rows]
        if any(cells) and title != "not_finite":  # which JSON adds
            columns.append(Column(title, cells, all(each[:1].isdigit() or each in ("", "-") for each in cells)))
    return Table(columns, styles=list(styles))


def _cell(value: Any) -> str:
    """A value of a table as text."""
    return "" if value is None else f"{value:.1e}" if isinstance(value, float) else str(value)
