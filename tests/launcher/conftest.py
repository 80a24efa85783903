from __future__ import annotations

from tests.behaviour.conftest import start, trained

__all__ = ["start", "trained"]
