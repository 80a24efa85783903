from __future__ import annotations

from tests.behaviour.conftest import start

__all__ = ["start"]
