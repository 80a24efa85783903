"""What a check answers, the journal that holds its answers at any moment, and how answers are shown. No torch.

task=operators and task=collectives are judged here, from the journal of rank 0.
"""

from __future__ import annotations

import faulthandler
import json
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Iterable, Mapping, Sequence

from exp import console
from exp.console import size
from exp.errors import EXIT_FAILED, EXIT_OK, RunError
from exp.report.tables import Table, as_rich
from exp.runs.files import read_json, to_json
from exp.runs.folder import blank_result

if TYPE_CHECKING:
    from pathlib import Path

    from exp.config.schema import ExpConfig
    from exp.launcher.base import Outcome
    from exp.runs.folder import RunFolder

__all__ = [
    "FAILED", "LIMITS_S", "OK", "SKIPPED", "WARNING", "Answer", "Journal", "end_journaled", "fail", "figure", "finish",
    "judge_collectives", "judge_operators", "ok", "say", "skip", "table_of", "why_ended", "worst",
]  # fmt: skip

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
_STYLES = {OK: "green", WARNING: "yellow", FAILED: "bold red", SKIPPED: "dim"}
LIMITS_S = {"operators": 120.0, "collectives": 45.0}
"""Longest that one of them may take: a card may compile an operator when it first meets it; a collective has nothing to
wait for but the other ranks."""
_LIMITS = {"float32": (1e-5, 1e-3), "float64": (1e-5, 1e-3), "bfloat16": (2e-2, 0.2), "float16": (2e-3, 2e-2)}
"""Largest relative difference that is equal, and that is not wrong, by the type of the result. An operator that adds up
many values in another order is a few 1e-7 off in float32."""
_ROUNDED = {"tf32": (5e-3, 5e-2), "efp": _LIMITS["bfloat16"]}
"""The same of float32, by the precision that products are rounded to."""
_ORDER = ("crashed", "failed", "wrong", "off", "left the card", "equal", "not compared")
_SHOWN = 4
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
        lines, _ = self.read(path)
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

    @staticmethod
    def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
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
        begun: of :meth:`Journal.read`.
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


def end_journaled(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int | None:
    """Judge and show what task=operators or task=collectives has found.

    Where something has ended the process, the journal gets ``crash``, and the same command goes on without it.

    Returns:
        The exit code; None: it failed otherwise.
    """
    kind = config.task.name
    path = folder.path / f"{kind}.jsonl"
    lines, begun = Journal.read(path)
    if outcome.exit_code != EXIT_OK:
        first = outcome.failures[0].message if outcome.failures else None
        why = None if begun is None else why_ended(begun, first, LIMITS_S[kind], time.time())
        if begun is None or why is None or outcome.interrupted_by is not None:
            return None
        lines.append({**begun, "crash": why})
        Journal.note(path, **lines[-1])
    elif not lines:
        return None
    group = (read_json(folder.result) or {}).get("process_group")
    answer = judge_operators(lines, config.precision) if kind == "operators" else judge_collectives(lines, group)
    return finish(config, folder, answer)


def judge_operators(lines: Sequence[Mapping[str, Any]], precision: str) -> Answer:
    """Make the table and judge it.

    Args:
        lines: of ``operators.jsonl``; those that ended the process have ``crash``.
        precision: of the training.

    Returns:
        With the table in ``values``: per operator ``status`` (the worst of ``crashed``, ``failed``, ``wrong``, ``off``,
        ``left the card``, ``equal``, ``not compared``), the ``relative`` difference, ``left`` (calls and bytes; bytes
        where they are counted), ``kernel`` (``portable`` ones are exp's own), the ``call`` that it is of, and the
        ``reason``.
    """
    worst_of: dict[str, dict[str, Any]] = {}
    rows = (_row(line, precision) for line in lines)
    for row in sorted(rows, key=lambda row: (_ORDER.index(row["status"]), -float(row["relative"] or 0))):
        worst_of.setdefault(row["operator"], row)
    table = sorted(worst_of.values(), key=lambda row: (_ORDER.index(row["status"]), row["operator"]))
    counts = {status: sum(row["status"] == status for row in table) for status in _ORDER}
    portable = sum(row["kernel"] != "" for row in table)
    finding = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    finding += f" ({portable} with portable kernels)" if portable else ""
    named = [row for row in table if row["status"] not in ("equal", "not compared")]
    finding += f": {'; '.join(map(_told, named[:_SHOWN]))}" if named else ""
    finding += "; ..." if len(named) > _SHOWN else ""
    values = {"table": table, "counts": counts}
    if counts["crashed"] or counts["failed"] or counts["wrong"]:
        advice = "report these operators to the vendor, portable ones to exp; docs/hardware/hardware.md says what "
        return fail(finding, f"{advice}stands in", **values)
    if all(row["relative"] is None for row in table):
        return fail(f"nothing was compared: {finding}", "look at output.log in the row's folder", **values)
    advice = "more than rounding: see whether the card multiplies in a lower precision" if counts["off"] else ""
    advice = "these operators run on the CPU, slowly: docs/hardware/hardware.md" if counts["left the card"] else advice
    return ok(finding, advice, **values)


def _row(line: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Of one call; JSON has no infinity, and says so beside."""
    relative: Any = math.inf if "relative" in line.get("not_finite", ()) else line.get("relative")
    calls, moved = line.get("left") or (0, 0)
    equal, right = _LIMITS.get(str(line.get("dtype")), (0.0, 0.0))
    if line.get("dtype") == "float32":
        equal, right = _ROUNDED.get(precision, (equal, right))
    if "crash" in line or "error" in line:
        status = "crashed" if "crash" in line else "failed"
    elif (relative or 0) > equal:
        status = "wrong" if relative > right else "off"
    else:
        status = "left the card" if calls else "not compared" if relative is None else "equal"
    return {
        "operator": line["name"],
        "status": status,
        "relative": None if relative is None else figure(relative),
        "left": f"{calls} calls" * (calls > 0) + f", {size(moved)}" * (moved > 0) if line.get("left") else "unknown",
        "kernel": "portable" if line.get("portable") else "",
        "call": line.get("detail"),
        "reason": line.get("crash") or line.get("error") or line.get("uncompared"),
    }


def _told(row: Mapping[str, Any]) -> str:
    apart = f"{float(row['relative'] or 0):.1e} at {row['call']}"
    why = row["reason"] or (row["left"] if row["status"] == "left the card" else apart)
    return f"{row['operator']}{' (portable)' if row['kernel'] else ''} {row['status']} ({why})"


def judge_collectives(lines: Sequence[Mapping[str, Any]], group: str | None) -> Answer:
    """Make the table of ``collectives.jsonl`` and judge it.

    Args:
        lines: of the journal; those that ended the process have ``crash``.
        group: the process group.
    """
    measured = [line for line in lines if "seconds" in line]
    refused = [f"{line['name']}: {line['error']}" for line in lines if "error" in line]
    bad = [f"{line['name']}, {line['kib']} KiB: {line['crash']}" for line in lines if "crash" in line]
    bad += [each for each in refused if " fp32: " in each]
    bad += [f"{line['name']}, {line['kib']} KiB: wrong on rank {', '.join(map(str, line['wrong']))}"
            for line in measured if line["wrong"]]  # fmt: skip
    table = [{"collective": line["name"], "KiB": line["kib"], "time": f"{line['seconds'] * 1e3:.3g} ms",
              "link, per second": size(line["bus_bytes_per_second"])} for line in measured]  # fmt: skip
    values = {"table": table, "process_group": group}
    if bad:
        advice = "broken collectives: try another version of the vendor's library, or backend.process_group=gloo"
        return fail("; ".join(bad[:4]), advice, **values)
    best = max(measured, key=lambda line: float(line["bus_bytes_per_second"]))
    finding = f"{len(measured)} right over {group}; up to {size(best['bus_bytes_per_second'])}/s in {best['name']} of "
    finding += f"{best['kib']} KiB" + f"; refused: {'; '.join(refused)}" * bool(refused)
    advice = "gradients travel in fp32 here; what sends others cannot use this library" if refused else ""
    return ok(finding, advice, **values)
