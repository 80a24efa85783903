"""Cambricon cards: the plug-in ``torch_mlu``, read in its public sources (1.22).

Never run on a card (docs/hardware/hardware.md).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from exp.backends import _monitor
from exp.backends.accelerator import AcceleratorBackend

__all__ = ["MluBackend", "parse_cnmon"]


class MluBackend(AcceleratorBackend):
    """Cambricon cards, with CNCL for tensors on cards.

    torch.accelerator needs torch 2.6; the vendor's last public plug-in is for 2.4, newer ones are part of its SDK.
    """

    own_type = "mlu"
    imports = ("torch_mlu",)
    visible_variables = ("MLU_VISIBLE_DEVICES",)
    capabilities = replace(
        AcceleratorBackend.capabilities,
        pinned_memory=True,
        reported_env=("MLU_", "CNCL_", "CNNL_", "TORCH_MLU_", "PYTORCH_MLU_ALLOC_CONF", "ENABLE_FALLBACK_TO_CPU"),
    )

    def monitor(self) -> list[dict[str, Any]]:
        """Readings of cnmon."""
        return _monitor.ask(parse_cnmon, ["cnmon"])


def parse_cnmon(text: str) -> list[dict[str, Any]]:
    """Parse the table of ``cnmon``: two lines for each card, then the processes, whose table has one column."""
    cards = []
    users = [tuple(map(int, row)) for row in re.findall(r"^\|\s+(\d+)\s+/\s+(\d+)\s[^|]*\|\s*$", text, re.MULTILINE)]
    for head, body in _monitor.rows_of_two_lines(text, lambda head: len(head[0]) > 2):
        index, words = int(head[0][0]), " ".join(body[0])
        sizes = re.findall(r"\d+", " ".join(body[1]))
        temperature, power = re.search(r"(\d+)C", words), re.search(r"(\d+) ?W", words)
        cards.append(
            _monitor.reading(
                index,
                name=head[0][2],
                bus_id=head[1][0] if ":" in head[1][0] else None,
                utilization_percent=_monitor.number(head[2][0]),
                memory_used=_monitor.size(sizes[0], _monitor.MIB) if sizes else None,
                memory_total=_monitor.size(sizes[1], _monitor.MIB) if len(sizes) > 1 else None,
                temperature_c=_monitor.number(temperature and temperature[1]),
                power_w=_monitor.number(power and power[1]),
                processes=[process for card, process in users if card == index],
            )
        )
    return cards
