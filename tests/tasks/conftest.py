from __future__ import annotations

from tests.behaviour.conftest import trained

__all__ = ["trained"]
