"""Which backends have simulated devices; what jobs on them do is in tests/behaviour/test_simulated.py."""

from __future__ import annotations

import pytest

from exp.backends_registry import choose, create_backend
from exp.errors import ConfigError


def test_cards_are_simulated_only_when_asked_for():
    assert choose(["gcu", "cpu"]) == "cpu"
    with pytest.raises(ConfigError, match="simulate=true"):
        create_backend({"_target_": "cpu", "name": "cpu", "simulate": True})
