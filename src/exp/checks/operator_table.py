"""The table of operators: of each, the worst that its calls have shown."""

from __future__ import annotations

import math
from typing import Any, Mapping, Sequence

from exp.checks.check import Answer, fail, ok
from exp.console import size

__all__ = ["judge_operators", "left_by"]

_LIMITS = {"float32": (1e-5, 1e-3), "float64": (1e-5, 1e-3), "bfloat16": (2e-2, 0.2), "float16": (2e-3, 2e-2)}
"""Largest relative difference that is equal, and that is not wrong, by the type of the result. An operator that adds up
many values in another order is a few 1e-7 off in float32."""
_ROUNDED = {"tf32": (5e-3, 5e-2), "efp": _LIMITS["bfloat16"]}
"""The same of float32, by the precision that products are rounded to."""
_EXACT = (0.0, 0.0)
_ORDER = ("crashed", "failed", "wrong", "off", "left the card", "equal", "not compared")
_BAD = _ORDER[:3]
_SHOWN = 4


def judge_operators(lines: Sequence[Mapping[str, Any]], precision: str) -> Answer:
    """Make the table and judge it.

    Args:
        lines: of ``operators.jsonl``; those that ended the process have ``crash``.
        precision: of the training.

    Returns:
        With the table in ``values["operators"]``: per operator ``status`` (the worst of ``crashed``, ``failed``,
        ``wrong``, ``off``, ``left the card``, ``equal``, ``not compared``), the call that it is of (``detail``), the
        ``relative`` and ``absolute`` difference, ``left`` (calls and bytes; null: unknown; bytes 0 where only calls are
        counted), ``portable`` (the kernel is exp's own), and ``said``.
    """
    table: dict[str, dict[str, Any]] = {}
    for line in lines:
        found = _status(line, precision)
        worst = table.setdefault(line["name"], found)
        rank = _ORDER.index(found["status"]), -float(found["relative"] or 0)
        if rank < (_ORDER.index(worst["status"]), -float(worst["relative"] or 0)):
            table[line["name"]] = {**found, "left": _more(worst["left"], found["left"])}
    rows = sorted(table.values(), key=lambda row: (_ORDER.index(row["status"]), row["name"]))
    counts = {status: sum(row["status"] == status for row in rows) for status in _ORDER}
    finding = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    portable = sum(row["portable"] for row in rows)
    finding += f" ({portable} with portable kernels)" if portable else ""
    named = [row for row in rows if row["status"] not in ("equal", "not compared")]
    if named:
        finding += ": " + "; ".join(_told(row) for row in named[:_SHOWN]) + ("; ..." if len(named) > _SHOWN else "")
    values: dict[str, Any] = {
        "operators": rows,
        "counts": counts,
        "fallbacks_known": any(row["left"] is not None for row in rows),
    }
    bad = {row["portable"] for row in rows if row["status"] in _BAD}
    if bad:
        theirs = "report these operators to the vendor; docs/hardware.md says what stands in"
        ours = "portable ones are exp's own: report them there, with the card"
        return fail(finding, "; ".join([theirs] * (False in bad) + [ours] * (True in bad)), **values)
    if all(row["relative"] is None for row in rows):
        return fail(f"nothing was compared: {finding}", "look at output.log in the row's folder", **values)
    if counts["left the card"]:
        return ok(finding, "these operators run on the CPU, slowly: docs/hardware.md", **values)
    if counts["off"]:
        return ok(finding, "more than rounding: see whether the card multiplies in a lower precision", **values)
    return ok(finding, **values)


def _status(line: Mapping[str, Any], precision: str) -> dict[str, Any]:
    found = {
        "name": line["name"],
        "detail": line.get("detail"),
        "dtype": line.get("dtype"),
        "relative": _number(line, "relative"),
        "absolute": _number(line, "absolute"),
        "left": line.get("left"),
        "portable": bool(line.get("portable")),
        "said": line.get("crash") or line.get("error") or line.get("uncompared"),
    }
    left = found["left"] is not None and found["left"][0] > 0
    if "crash" in line:
        status = "crashed"
    elif "error" in line:
        status = "failed"
    elif found["relative"] is None:
        status = "left the card" if left else "not compared"
    else:
        equal, right = _LIMITS.get(str(found["dtype"]), _EXACT)
        if found["dtype"] == "float32":
            equal, right = _ROUNDED.get(precision, (equal, right))
        relative = found["relative"]
        status = "wrong" if relative > right else "off" if relative > equal else "left the card" if left else "equal"
    return {**found, "status": status}


def _number(line: Mapping[str, Any], key: str) -> float | None:
    """A figure of a line; JSON has no infinity, and says so beside."""
    if key in line.get("not_finite", ()):
        return math.inf
    value = line.get(key)
    return None if value is None else float(value)


def _more(first: Any, second: Any) -> Any:
    return max((each for each in (first, second) if each is not None), default=None)


def left_by(left: Sequence[int]) -> str:
    """Calls and bytes that have left the card, in words; bytes where they are counted."""
    return f"{left[0]} calls" + (f", {size(left[1])}" if left[1] else "")


def _told(row: Mapping[str, Any]) -> str:
    name = f"{row['name']} (portable)" if row["portable"] else row["name"]
    if row["status"] in ("crashed", "failed"):
        return f"{name} {row['status']} ({row['said']})"
    if row["status"] == "left the card":
        return f"{name} left the card ({left_by(row['left'])})"
    return f"{name} {row['status']} by {row['relative']:.1e} at {row['detail']}"
