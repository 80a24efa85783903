"""The torch operators that GCU cards of the current generation run on the CPU, tensor by tensor.

The source is a table of the vendor's plug-in (``torch_gcu-<release>.txt``, made by simulators/gcu/operator_table.py),
which the simulated card reads, too. It lists the operators without a kernel on any card, and, by card model, those that
the plug-in sends to the CPU although it has a kernel. Operators that torch composes of others are not listed.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Mapping

from exp.errors import ConfigError

__all__ = ["FLOAT32_ATTENTION", "lacking_operators", "operator_counts"]

_TABLE = Path(__file__).with_name("torch_gcu-2.10.txt")
_CARDS = {3: ("s60",), 4: ("l600",)}
"""Card names in the table by major version of the architecture: 3 is S60, 4 is L300 and L600."""

FLOAT32_ATTENTION = (3,)
"""Major versions whose fused attention supports float32; on L600 it crashes the process."""

# There may be no space after a long name: the vendor pads names to a fixed width.
_USE = re.compile(r"^Op name: (?:aten::)?([\w.]+?)\s*Use count: *(\d+)", re.MULTILINE)


@functools.lru_cache(maxsize=None)
def _table() -> Mapping[str, frozenset[str]]:
    """Overloads, such as ``add.Tensor``, by section of the table."""
    sections: dict[str, list[str]] = {}
    words: list[str] = []
    for line in _TABLE.read_text(encoding="ascii").splitlines():
        if line.startswith("["):
            words = sections.setdefault(line.strip("[]"), [])
        elif not line.startswith("#"):
            words += line.split()
    return {heading: frozenset(names) for heading, names in sections.items()}


def _base(name: str) -> str:
    return name.partition(".")[0]


@functools.lru_cache(maxsize=None)
def lacking_operators(major: int, native: tuple[str, ...] = ()) -> frozenset[str]:
    """Overloads that a card runs on the CPU.

    Args:
        major: major version of the card's architecture. For an unknown one, the overloads that any known card lacks.
        native: names without overload to leave out: operators for which the installed plug-in has a kernel
            nevertheless, or which it shall run in its own way.

    Raises:
        ConfigError: ``native`` has a name that no card lacks.
    """
    table = _table()
    either = table["cpu"].union(*(table[f"cpu on {card}"] for cards in _CARDS.values() for card in cards))
    unknown = sorted(set(native) - set(map(_base, either)))
    if unknown:
        raise ConfigError(
            f"backend.options.native has {', '.join(unknown)}, which no GCU lacks",
            "write a list of ATen names without an overload, such as [gelu_backward]",
        )
    lacks = table["cpu"].union(*(table[f"cpu on {card}"] for card in _CARDS[major])) if major in _CARDS else either
    return frozenset(name for name in lacks if _base(name) not in set(native))


def operator_counts(statistics: str, names: frozenset[str]) -> Mapping[str, tuple[int, int]] | None:
    """Calls of some operators, from the text of the vendor's operator statistics.

    Args:
        statistics: result of ``torch.gcu.debug.get_op_statistics_info``.
        names: the overloads.

    Returns:
        Number of calls, and 0 for the bytes, which the text lacks, by name without overload; None if the text has no
        count in the known format.
    """
    uses = _USE.findall(statistics)
    if not uses:
        return None
    counts: dict[str, tuple[int, int]] = {}
    for name, calls in uses:
        if name in names:
            counts[_base(name)] = (counts.get(_base(name), (0, 0))[0] + int(calls), 0)
    return counts
