from __future__ import annotations

from tests.simulators.conftest import card

__all__ = ["card"]
