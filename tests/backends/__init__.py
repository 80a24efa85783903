from __future__ import annotations

from typing import Any

from exp.hardware.backend import Backend
from exp.hardware.registry import create_backend


def made(target: str, **settings: Any) -> Backend:
    """The backend that a configuration with this ``_target_`` and these settings makes."""
    return create_backend({"_target_": target, "name": target, **settings})
