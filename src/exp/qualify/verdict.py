"""The verdict of a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["FAIL", "NOT_RUN", "PASS", "WARN", "Verdict"]

PASS, WARN, FAIL, NOT_RUN = "pass", "warn", "fail", "not run"


@dataclass
class Verdict:
    """What a row has shown.

    Attributes:
        verdict: ``pass``, ``warn``, ``fail`` or ``not run``.
        finding: why, in a line.
        advice: what to do; empty: nothing.
        values: figures, by name.
    """

    verdict: str
    finding: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def warn(self, advice: str) -> None:
        """It works, but the user should do something."""
        self.verdict = WARN
        self.advice = self.advice or advice
