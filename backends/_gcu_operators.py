"""Which operators of torch run on the CPU on GCU cards of the current generation, tensor by tensor.

From the table of the vendor's plug-in (``torch_gcu-<release>.txt``, made by simulators/gcu/operator_table.py), which
the simulated card reads too: what it sends to the CPU although there is a kernel, by model of card, and what it has no
kernel for, on any. Operators that torch composes of others are in neither.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Mapping

from exp.errors import ConfigError

__all__ = ["FLOAT32_ATTENTION", "counted", "lacking"]

_TABLE = Path(__file__).with_name("torch_gcu-2.10.txt")
_CARDS = {3: ("s60",), 4: ("l600",)}
"""By the major version of the architecture: 3 is S60, 4 are L300 and L600."""

FLOAT32_ATTENTION = (3,)
"""Majors whose fused attention takes float32; that of L600 ends the process."""

# Long names touch the word that follows: the vendor pads them to a width, without a space of their own.
_USE = re.compile(r"^Op name: (?:aten::)?([\w.]+?)\s*Use count: *(\d+)", re.MULTILINE)


@functools.lru_cache(maxsize=None)
def _table() -> Mapping[str, frozenset[str]]:
    """Overloads, such as ``add.Tensor``, by heading of the table."""
    found: dict[str, list[str]] = {}
    words: list[str] = []
    for line in _TABLE.read_text(encoding="ascii").splitlines():
        if line.startswith("["):
            words = found.setdefault(line.strip("[]"), [])
        elif not line.startswith("#"):
            words += line.split()
    return {heading: frozenset(names) for heading, names in found.items()}


def _base(name: str) -> str:
    return name.partition(".")[0]


@functools.lru_cache(maxsize=None)
def lacking(major: int, native: tuple[str, ...] = ()) -> frozenset[str]:
    """Overloads that a card runs on the CPU.

    Args:
        major: of its architecture; what either of the known ones lacks for another.
        native: names, without an overload, of what the installed plug-in has kernels for all the same, or is to run in
            its own way.

    Raises:
        ConfigError: there is a name in ``native`` that no card lacks.
    """
    table = _table()
    either = table["cpu"].union(*(table[f"cpu on {card}"] for cards in _CARDS.values() for card in cards))
    unknown = sorted(set(native) - set(map(_base, either)))
    if unknown:
        raise ConfigError(
            f"backend.options.native has {', '.join(unknown)}, which no GCU lacks; write a list of ATen names "
            "without an overload, such as [gelu_backward]"
        )
    lacks = table["cpu"].union(*(table[f"cpu on {card}"] for card in _CARDS[major])) if major in _CARDS else either
    return frozenset(name for name in lacks if _base(name) not in set(native))


def counted(statistics: str, names: frozenset[str]) -> Mapping[str, tuple[int, int]] | None:
    """Calls of some operators in the vendor's text of statistics, which has no bytes.

    Args:
        statistics: what ``torch.gcu.debug.get_op_statistics_info`` gives.
        names: which overloads.

    Returns:
        Calls and 0, by name without an overload; None where the text counts no operator at all, in known words.
    """
    uses = _USE.findall(statistics)
    if not uses:
        return None
    found: dict[str, tuple[int, int]] = {}
    for name, calls in uses:
        if name in names:
            found[_base(name)] = (found.get(_base(name), (0, 0))[0] + int(calls), 0)
    return found
