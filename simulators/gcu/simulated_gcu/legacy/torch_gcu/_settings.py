"""Settings of the simulated cards, from environment variables."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import simulated_gcu

__all__ = ["Settings", "from_environment", "physical_card"]

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class Settings(NamedTuple):
    """Settings of the cards; fields are in the order of the native function ``configure``."""

    count: int
    memory: int
    graph_limit: int
    strict: bool
    wide_integers: bool


def from_environment() -> Settings:
    """Read ``SIM_GCU_*``, ``TOPS_VISIBLE_DEVICES`` and ``TORCH_GCU_ENABLE_INT64_AND_UINT64``.

    Raises:
        ValueError: a variable has an invalid value.
    """
    return Settings(
        count=simulated_gcu.device_count(),
        memory=_bytes("SIM_GCU_MEMORY", "32GiB"),
        graph_limit=_integer("SIM_GCU_GRAPH_LIMIT", "200000"),
        strict=os.environ.get("SIM_GCU_STRICT") == "1",
        wide_integers=os.environ.get("TORCH_GCU_ENABLE_INT64_AND_UINT64", "").lower() in ("true", "1"),
    )


def physical_card(card: int) -> int:
    """Number on the host of the card with index ``card`` in this process."""
    visible = os.environ.get("TOPS_VISIBLE_DEVICES")
    return card if visible is None else int(visible.split(",")[card])


def _bytes(name: str, default: str) -> int:
    text = os.environ.get(name) or default
    match = re.fullmatch(r"(\d+)\s*(KiB|MiB|GiB|)", text.strip())
    if match is None:
        raise ValueError(f"simulated gcu: {name}={text} is not a size; write bytes, or a number with KiB, MiB or GiB")
    return int(match.group(1)) * _UNITS[match.group(2)]


def _integer(name: str, default: str) -> int:
    text = os.environ.get(name) or default
    if not text.strip().isdigit():
        raise ValueError(f"simulated gcu: {name}={text} is not a whole number")
    return int(text)
