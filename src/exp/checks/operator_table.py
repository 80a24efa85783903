"""The table of operators: of each, the worst that its calls have shown. Imports no torch."""

from __future__ import annotations

import math
from typing import Any, Mapping, Sequence

from exp.checks.check import Answer, fail, ok
from exp.console import size

__all__ = ["judge_operators"]

_LIMITS = {"float32": (1e-5, 1e-3), "float64": (1e-5, 1e-3), "bfloat16": (2e-2, 0.2), "float16": (2e-3, 2e-2)}
"""Largest relative difference that is equal, and that is not wrong, by the type of the result. An operator that adds up
many values in another order is a few 1e-7 off in float32."""
_ROUNDED = {"tf32": (5e-3, 5e-2), "efp": _LIMITS["bfloat16"]}
"""The same of float32, by the precision that products are rounded to."""
_ORDER = ("crashed", "failed", "wrong", "off", "left the card", "equal", "not compared")
_SHOWN = 4


def judge_operators(lines: Sequence[Mapping[str, Any]], precision: str) -> Answer:
    """Make the table and judge it.

    Args:
        lines: of ``operators.jsonl``; those that ended the process have ``crash``.
        precision: of the training.

    Returns:
        With the table in ``values``: per operator ``status`` (the worst of ``crashed``, ``failed``, ``wrong``, ``off``,
        ``left the card``, ``equal``, ``not compared``), the ``call`` that it is of, the ``relative`` difference,
        ``left`` (calls and bytes; bytes where they are counted), ``kernel`` (``portable`` ones are exp's own), and the
        ``reason``.
    """
    worst: dict[str, tuple[tuple[int, float], dict[str, Any]]] = {}
    for line in lines:
        status, relative = _status(line, precision)
        rank = _ORDER.index(status), -relative
        row = {
            "operator": line["name"],
            "status": status,
            "relative": None if "relative" not in line else relative,
            "left": _left(line.get("left")),
            "kernel": "portable" if line.get("portable") else "",
            "call": line.get("detail"),
            "reason": line.get("crash") or line.get("error") or line.get("uncompared"),
        }
        if line["name"] not in worst or rank < worst[line["name"]][0]:
            worst[line["name"]] = rank, row
    table = sorted((row for _, row in worst.values()), key=lambda row: (_ORDER.index(row["status"]), row["operator"]))
    counts = {status: sum(row["status"] == status for row in table) for status in _ORDER}
    portable = sum(row["kernel"] != "" for row in table)
    finding = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    finding += f" ({portable} with portable kernels)" if portable else ""
    named = [row for row in table if row["status"] not in ("equal", "not compared")]
    if named:
        finding += ": " + "; ".join(map(_described, named[:_SHOWN])) + "; ..." * (len(named) > _SHOWN)
    values = {"table": table, "counts": counts}
    bad = {row["kernel"] for row in table if row["status"] in ("crashed", "failed", "wrong")}
    if bad:
        theirs = ["report these operators to the vendor; docs/hardware/hardware.md says what stands in"] * ("" in bad)
        ours = ["portable ones are exp's own: report them there, with the card"] * ("portable" in bad)
        return fail(finding, "; ".join(theirs + ours), **values)
    if all(row["relative"] is None for row in table):
        return fail(f"nothing was compared: {finding}", "look at output.log in the row's folder", **values)
    advice = "more than rounding: see whether the card multiplies in a lower precision" if counts["off"] else ""
    advice = "these operators run on the CPU, slowly: docs/hardware/hardware.md" if counts["left the card"] else advice
    return ok(finding, advice, **values)


def _status(line: Mapping[str, Any], precision: str) -> tuple[str, float]:
    """Of one call, with its relative difference; JSON has no infinity, and says so beside."""
    relative = math.inf if "relative" in line.get("not_finite", ()) else line.get("relative")
    left = bool(line.get("left") and line["left"][0])
    if "crash" in line or "error" in line:
        return "crashed" if "crash" in line else "failed", 0.0
    if relative is None:
        return "left the card" if left else "not compared", 0.0
    equal, right = _LIMITS.get(str(line["dtype"]), (0.0, 0.0))
    if line["dtype"] == "float32":
        equal, right = _ROUNDED.get(precision, (equal, right))
    status = "wrong" if relative > right else "off" if relative > equal else "left the card" if left else "equal"
    return status, relative


def _left(left: Sequence[int] | None) -> str:
    if left is None:
        return "unknown"
    calls, moved = left
    return f"{calls} calls" * (calls > 0) + f", {size(moved)}" * (moved > 0)


def _described(row: Mapping[str, Any]) -> str:
    name = f"{row['operator']} (portable)" if row["kernel"] else row["operator"]
    if row["status"] in ("crashed", "failed"):
        return f"{name} {row['status']} ({row['reason']})"
    if row["status"] == "left the card":
        return f"{name} left the card ({row['left']})"
    return f"{name} {row['status']} by {row['relative']:.1e} at {row['call']}"
