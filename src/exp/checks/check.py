"""Results of checks, the journal that a worker writes them to, and how they are printed. Imports no torch.

This module also evaluates task=operators and task=collectives, from the journal of rank 0.
"""

from __future__ import annotations

import faulthandler
import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from exp import console
from exp.console import format_bytes
from exp.errors import EXIT_FAILED, EXIT_OK, RunError
from exp.report.formats import Table, as_rich, count_words
from exp.runs.files import read_json, to_json
from exp.runs.record import empty_result

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.launcher.outcome import Outcome
    from exp.runs.folder import RunFolder

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
_STYLES = {OK: "green", WARNING: "yellow", FAILED: "bold red", SKIPPED: "dim"}
LIMITS_S = {"operators": 120.0, "collectives": 45.0}
"""Time limit of one operator or one collective, in seconds. An operator may be compiled at its first call; a collective
waits only for the other ranks."""
STEP = "training step"
"""Name in ``operators.jsonl`` of the first training step as a whole."""
_LIMITS = {"float32": (1e-5, 1e-3), "float64": (1e-5, 1e-3), "bfloat16": (2e-2, 0.2), "float16": (2e-3, 2e-2)}
"""Two limits of the relative difference, by dtype of the result. Up to the first, results count as equal; above the
second, as wrong; in between, as off. A float32 sum in another order differs by a few 1e-7."""
_LIMITS_ROUNDED = {"tf32": (5e-3, 5e-2), "efp": _LIMITS["bfloat16"]}
"""The same two limits for float32 results, if ``precision`` rounds float32 products."""
_WORST_FIRST = ("crashed", "failed", "wrong", "off", "left the card", "equal", "not compared")
_MAX_NAMED = 4
_STDERR = 2  # file descriptor, not sys.stderr: the launcher redirects it to the log of the rank


@dataclass
class CheckResult:
    """Result of a check.

    Attributes:
        status: ``ok``, ``warning``, ``failed`` or ``skipped``.
        finding: the reason, in one line.
        advice: what the user should do; empty: nothing.
        values: measured values by name. ``table``, if present, is a list of dicts with the same keys.
        seconds: duration of the check; None: not measured.
    """

    status: str
    finding: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None


def ok(finding: str, advice: str = "", **values: Any) -> CheckResult:
    """The result of a check that passed: status ``ok``, or ``warning`` if there is advice."""
    return CheckResult(WARNING if advice else OK, finding, advice, values)


def fail(finding: str, advice: str, **values: Any) -> CheckResult:
    """The result of a check that failed."""
    return CheckResult(FAILED, finding, advice, values)


def skip(reason: str, advice: str = "") -> CheckResult:
    """The result of a check that was not run."""
    return CheckResult(SKIPPED, reason, advice)


def round2(value: float) -> float | str:
    """A number for a table, rounded to two digits; infinity and NaN become text, because JSON cannot store them."""
    return float(f"{value:.1e}") if math.isfinite(value) else str(value)


class Journal:
    """A file of JSON lines that records each step before it starts; after a crash, the last line names its cause.

    If a step exceeds its time limit, the process prints its stack to stderr and exits. faulthandler does this in a
    thread of its own, which does not need the interpreter lock (GIL); a hanging driver may hold that lock.

    Args:
        path: the file; its earlier content is deleted, except the crashes described below. It is opened anew for each
            line, so that other nodes see the line at once.
        limit_s: time limit from :meth:`begin` to :meth:`end`, in seconds.

    Attributes:
        crashed: if the last line of the file records a crash: names of all steps that crashed in earlier attempts.
            Their lines stay in the file.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        self.path, self._limit_s = path, limit_s
        lines, _ = self.read(path)
        crash_lines = [line for line in lines if "crash" in line] if lines and "crash" in lines[-1] else []
        self.crashed = {line["name"] for line in crash_lines}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        for line in crash_lines:
            self.append(path, **line)

    def begin(self, name: str, limit_s: float | None = None, **values: Any) -> None:
        """Record that a step starts, and start its time limit; None: that of the journal."""
        limit_s = limit_s or self._limit_s
        self.append(self.path, ended=False, name=name, **values, since=time.time(), limit_s=limit_s)
        faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)

    def end(self, name: str, **values: Any) -> None:
        """Record the result of the step, and stop the time limit."""
        faulthandler.cancel_dump_traceback_later()
        self.append(self.path, name=name, **values)

    @staticmethod
    def append(path: Path, ended: bool = True, **line: Any) -> None:
        """Append a line to a journal; the process need not be the one that created it."""
        with path.open("ab") as file:  # a newline first: the process before may have died while it wrote a line
            file.write(f"\n{to_json({**line, 'ended': ended})}".encode())

    @staticmethod
    def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """Read a journal.

        Returns:
            The lines of all finished steps, in order; and the line of the step that started but did not finish, or
            None.
        """
        finished, unfinished = [], None
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the process died while it wrote this line
            unfinished = None if record.pop("ended") else record
            finished += [] if unfinished else [record]
        return finished, unfinished


def crash_reason(
    unfinished: Mapping[str, Any], message: str | None, now: float, limit_s: float | None = None
) -> str | None:
    """Why a process ended during an unfinished step; None: unknown.

    Args:
        unfinished: line of the unfinished step, from :meth:`Journal.read`.
        message: headline of the rank's failure; None: there is none.
        now: time at which the job had ended, in seconds since the epoch.
        limit_s: after this time a step counts as hung; None: after its time limit in the journal.
    """
    limit_s = limit_s or float(unfinished["limit_s"])
    return f"hung: no end within {limit_s:g} s" if now - unfinished["since"] >= limit_s else message


def report_result(
    config: ExpConfig, folder: RunFolder, check: CheckResult, printed: Sequence[CheckResult] = (), **more: Any
) -> int:
    """Print the result of a task that checks, and write it to ``result.json``.

    Args:
        config: configuration of the run.
        folder: the run folder.
        check: written to the key ``check``.
        printed: results to print instead of ``check``, such as the single findings that it combines.
        **more: further keys of ``result.json``.

    Returns:
        The exit code.
    """
    terminal, table = console.make_console(), table_of(check.values)
    if table is not None:  # before anything is written: the failed check may be about a full disk
        terminal.print("\n", as_rich(table), sep="")
    for result in printed or [check]:
        print_result(result)
    terminal.print(f"run folder: {console.display_path(folder.path)}", soft_wrap=True, markup=False)
    content = {**(read_json(folder.result) or empty_result(config)), "status": "completed", **more}
    if check.status == FAILED:
        message = RunError(check.finding, check.advice).headline
        content.update(status="failed", error={"rank": None, "type": RunError.__name__, "message": message})
    folder.write_result({**content, "check": asdict(check)})
    return EXIT_FAILED if check.status == FAILED else EXIT_OK


def print_result(check: CheckResult) -> None:
    """Print a status in color, then the finding and the advice."""
    terminal = console.make_console()
    terminal.print(check.status, style=_STYLES[check.status], end="")
    advice = f"\n  do: {check.advice}" * bool(check.advice)
    terminal.print(f": {check.finding}{advice}", soft_wrap=True, markup=False)


def table_of(values: Mapping[str, Any]) -> Table | None:
    """The table in the values of a result, without rows of status ``equal``; None: no rows are left.

    A row is colored by the first word of its ``verdict``.
    """
    rows = [row for row in values.get("table", ()) if row.get("status") != "equal"]
    styles = [_STYLES.get(str(row.get("verdict", "")).partition(":")[0], "") for row in rows]
    return Table.of(rows, styles) if rows else None


def report_journal(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int | None:
    """Evaluate and print the results of task=operators or task=collectives.

    If a step has ended the process, a line with ``crash`` is added to the journal; the same command, started again,
    skips this step.

    Returns:
        The exit code; None: there is nothing to evaluate, or the run failed for another reason.
    """
    path = folder.path / f"{config.task.name}.jsonl"
    lines, unfinished = Journal.read(path)
    if outcome.exit_code != EXIT_OK:
        message = outcome.failures[0].headline if outcome.failures else None
        reason = None if unfinished is None else crash_reason(unfinished, message, time.time())
        if unfinished is None or reason is None:
            return None
        lines.append({**unfinished, "crash": reason})
        Journal.append(path, **lines[-1])
    elif not lines:
        return None
    if config.task.name == "operators":
        return report_result(config, folder, evaluate_operators(lines, config.precision))
    group = (read_json(folder.result) or {}).get("process_group")
    return report_result(config, folder, evaluate_collectives(lines, group))


def evaluate_operators(lines: Sequence[Mapping[str, Any]], precision: str) -> CheckResult:
    """Summarize ``operators.jsonl`` in a table with one row per operator, and evaluate it.

    Args:
        lines: lines of the journal; a line with ``crash`` is of an operator that ended the process.
        precision: precision of the training.

    Returns:
        A result whose ``values`` have the table. Each row is the worst call of one operator: ``status`` (from worst
        to best ``crashed``, ``failed``, ``wrong``, ``off``, ``left the card``, ``equal``, ``not compared``); the
        ``relative`` difference; ``left``, CPU fallbacks as number of calls and, if they are counted, bytes;
        ``kernel``, ``portable`` if the kernel is exp's own; ``call``, dtypes and shapes of the arguments; ``reason``.
        ``guilty``, also in ``values``, are the smallest sets of operators that make the first training step wrong.
    """
    guilty: list[list[str]] = [names for line in lines for names in line.get("guilty", ())]
    partners = {name: [other for other in names if other != name] for names in guilty[::-1] for name in names}
    compared = [line for line in lines if line["name"] != STEP or line.keys() & {"crash", "uncompared"}]
    rows = [_row(line, precision, partners.get(line["name"], [])) for line in compared]
    rows.sort(key=lambda row: (_WORST_FIRST.index(row["status"]), -float(row["relative"] or 0)))
    worst_of: dict[str, dict[str, Any]] = {}
    for row in rows:
        worst_of.setdefault(row["operator"], row)
    table = list(worst_of.values())
    statuses = {row["status"] for row in table}
    portable = sum(row["kernel"] != "" for row in table)
    finding = count_words(row["status"] for row in table)
    finding += f" ({portable} with portable kernels)" if portable else ""
    bad_rows = [row for row in table if row["status"] not in ("equal", "not compared")]
    finding += f": {'; '.join(map(_row_text, bad_rows[:_MAX_NAMED]))}" if bad_rows else ""
    finding += "; ..." if len(bad_rows) > _MAX_NAMED else ""
    if statuses & {"crashed", "failed", "wrong"}:
        advice = "report these operators to the vendor, portable ones to exp; docs/hardware/hardware.md has "
        return fail(finding, f"{advice}replacements", table=table, guilty=guilty)
    if all(row["relative"] is None for row in table):
        return fail(f"nothing was compared: {finding}", "look at output.log in the check's folder", table=table)
    advice = "more than rounding: check whether the card multiplies in a lower precision" * ("off" in statuses)
    if "left the card" in statuses:
        advice = "these operators run on the CPU, slowly: docs/hardware/hardware.md"
    return ok(finding, advice, table=table, guilty=guilty)


def operator_status(line: Mapping[str, Any], precision: str) -> str:
    """Status of one call of an operator.

    Args:
        line: of the journal; or only the difference, from :func:`exp.checks.operators.difference`.
        precision: precision of the training.
    """
    if "crash" in line or "error" in line:
        return "crashed" if "crash" in line else "failed"
    dtype, relative = str(line.get("dtype")), _relative(line)
    equal_below, wrong_above = _LIMITS.get(dtype, (0.0, 0.0))
    if dtype == "float32":
        equal_below, wrong_above = _LIMITS_ROUNDED.get(precision, (equal_below, wrong_above))
    if relative is not None and relative > equal_below:
        return "wrong" if relative > wrong_above else "off"
    return "left the card" if any(line.get("left") or ()) else "not compared" if relative is None else "equal"


def _relative(line: Mapping[str, Any]) -> float | None:
    """The relative difference; an infinite one is listed in ``not_finite``, because JSON cannot store it."""
    return math.inf if "relative" in line.get("not_finite", ()) else line.get("relative")


def _row(line: Mapping[str, Any], precision: str, partners: Sequence[str]) -> dict[str, Any]:
    """The table row of one call; ``partners`` are the operators that it is wrong together with."""
    relative, status = _relative(line), operator_status(line, precision)
    reason = line.get("crash") or line.get("error") or line.get("uncompared")
    if partners and reason is None:
        status, reason = "wrong", f"only together with {', '.join(partners)}"
    calls, moved = line.get("left") or (0, 0)
    fallbacks = f"{calls} calls" * (calls > 0) + f", {format_bytes(moved)}" * (moved > 0)
    return {
        "operator": line["name"],
        "status": status,
        "relative": None if relative is None else round2(relative),
        "left": fallbacks if line.get("left") else "unknown",
        "kernel": "portable" if line.get("portable") else "",
        "call": line.get("detail"),
        "reason": reason,
    }


def _row_text(row: Mapping[str, Any]) -> str:
    difference = f"{float(row['relative'] or 0):.1e} at {row['call']}"
    reason = row["reason"] or (row["left"] if row["status"] == "left the card" else difference)
    return f"{row['operator']}{' (portable)' if row['kernel'] else ''} {row['status']} ({reason})"


def evaluate_collectives(lines: Sequence[Mapping[str, Any]], group: str | None) -> CheckResult:
    """Summarize ``collectives.jsonl`` in a table, and evaluate it.

    Args:
        lines: lines of the journal; a line with ``crash`` is of a collective that ended the process.
        group: the process group, such as ``"cpu:gloo,<device>:<library>"``.
    """
    errors = [(line, f"{line['name']}, {line['kib']} KiB: {line.get('crash') or line.get('error')}") for line in lines]
    refused = [text for line, text in errors if line.get("refused") and line["name"] != "all_reduce fp32"]
    bad = [text for line, text in errors if line.keys() & {"crash", "error"} and text not in refused]
    measured = [line for line in lines if "seconds" in line]
    table = [{"collective": line["name"], "KiB": line["kib"], "time": f"{line['seconds'] * 1e3:.3g} ms",
              "link, per second": format_bytes(line["bus_bytes_per_second"])} for line in measured]  # fmt: skip
    if bad:
        advice = "broken collectives: try another version of the vendor's library, or backend.process_group=gloo"
        return fail("; ".join(bad[:_MAX_NAMED]), advice, table=table)
    best = max(measured, key=lambda line: float(line["bus_bytes_per_second"]))
    peak = f"{format_bytes(best['bus_bytes_per_second'])}/s in {best['name']} of {best['kib']} KiB"
    finding = f"{len(measured)} right over {group}; up to {peak}" + f"; refused: {'; '.join(refused)}" * bool(refused)
    advice = "exp exchanges gradients in fp32; code that exchanges the refused types fails here" if refused else ""
    return ok(finding, advice, table=table)
