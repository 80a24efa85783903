"""Which GCU cards are there and visible, and which generation of the plug-in goes with torch. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from exp.backends import _efml, _probe

__all__ = ["VISIBLE", "count_cards", "how_to_install", "is_legacy", "visible_cards"]

VISIBLE = "TOPS_VISIBLE_DEVICES"
_TOPS = Path("/opt/tops")


def is_legacy() -> bool:
    """Whether the installed torch is one that only the legacy plug-in goes with (< 2.0)."""
    return int((_probe.torch_build()["version"] or "2").split(".")[0]) < 2


def visible_cards() -> list[int] | None:
    """Numbers on the host of the visible cards, by the management library; None where only the plug-in can tell."""
    total, visible = _efml.count(), os.environ.get(VISIBLE)
    if total is None:
        return None
    names = [] if visible is None else visible.split(",")
    if all(name.strip().lstrip("-").isdigit() or not name.strip() for name in names):
        return [_probe.visible_card(index, VISIBLE) or 0 for index in range(_probe.count_visible(total, VISIBLE))]
    if not all(name.strip().startswith("GCU-") for name in names):
        return None  # parts of cards
    found = [_efml.card_of(name) for name in names]  # as the plug-in: a name after a space is none
    known = [card for card in found[: (*found, None).index(None)] if card is not None]
    return known if len(set(known)) == len(known) else []


def count_cards(script: str) -> tuple[int, str | None]:
    """The number of visible cards, and why there is no answer, or None; ``script`` has the plug-in count them."""
    cards = visible_cards()
    if cards is not None:
        return len(cards), None
    return _probe.count_by_torch(script, (os.environ.get(VISIBLE),))


def how_to_install() -> str:
    """Where the plug-in may be that this interpreter does not see."""
    packages = sorted(_TOPS.glob("lib/python3*/site-packages/torch_gcu"))
    if packages:
        return f"it is in {packages[0].parent}: put that on PYTHONPATH, in an environment of the same Python version"
    if _TOPS.is_dir():
        return (
            f"{_TOPS} is there, so the system's Python may have it: use an environment that sees the system's packages "
            "(make setup SYSTEM=1, or python -m venv --system-site-packages)"
        )
    return "install the one that goes with torch from the vendor's TopsRider package"
