"""Judgment in the parent of task=operators and task=collectives, from the journal of rank 0. No torch."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from exp.checks.check import Answer, Journal, fail, figure, finish, ok, read_journal, why_ended
from exp.console import size
from exp.errors import EXIT_OK
from exp.runs.files import read_json

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.launcher.outcome import Outcome
    from exp.runs.folder import RunFolder

__all__ = ["LIMITS_S", "end_journaled", "judge_collectives", "judge_operators"]

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


def end_journaled(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int | None:
    """Judge and show what task=operators or task=collectives has found.

    Where something has ended the process, the journal gets ``crash``, and the same command goes on without it.

    Returns:
        The exit code; None: it failed otherwise.
    """
    kind = config.task.name
    path = folder.path / f"{kind}.jsonl"
    lines, begun = read_journal(path)
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
