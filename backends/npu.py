"""Ascend cards: the plug-in ``torch_npu``, read in its wheel 2.14.0.

Never run on a card (docs/hardware/hardware.md).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from dataclasses import replace
from typing import Any

from exp.backends import _monitor, _probe
from exp.backends.accelerator import AcceleratorBackend

__all__ = ["NpuBackend", "parse_npu_smi"]

_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_LIBRARY = ("libascend_hal.so", (), "drvGetDevNum")
_EXIT_MODULES = ("torch_npu._init.core.runtime_lifecycle", "torch_npu")  # 2.14; older releases


class NpuBackend(AcceleratorBackend):
    """Ascend cards, with HCCL for tensors on cards. Torch must be its CPU build: the plug-in refuses any other."""

    own_type = "npu"
    imports = ("torch_npu",)
    visible_variables = (_VISIBLE,)
    capabilities = replace(
        AcceleratorBackend.capabilities,
        pinned_memory=True,
        reported_env=("ASCEND_", "HCCL_", "PYTORCH_NPU_ALLOC_CONF", "TASK_QUEUE_ENABLE"),
    )

    def count_by_driver(self) -> int | None:
        """Number of visible cards; the runtime sees none unless the variable lists numbers in ascending order."""
        total = _probe.cards_by_library(*_LIBRARY)
        listed = os.environ.get(_VISIBLE)
        if total is None or listed is None:
            return total
        numbers = [int(number) for number in re.match(r"[\d,]*", listed)[0].split(",") if number]  # type: ignore[index]
        if any(number <= before for before, number in zip(numbers, numbers[1:])):
            return 0
        return sum(number < total for number in numbers)

    def monitor(self) -> list[dict[str, Any]]:
        """Readings of npu-smi."""
        return _monitor.ask(parse_npu_smi, ["npu-smi", "info"])

    def close(self) -> None:
        """Shut the card down as the plug-in does when the interpreter ends."""
        for name in _EXIT_MODULES:
            with contextlib.suppress(ImportError):
                shutdown = getattr(importlib.import_module(name), "_npu_shutdown", None)
                if shutdown is not None:
                    shutdown()
                    return


def parse_npu_smi(text: str) -> list[dict[str, Any]]:
    """Parse the tables of ``npu-smi info``: two lines for each chip, then the processes.

    Chips are counted from 0 in the order of the table, as ASCEND_RT_VISIBLE_DEVICES counts them.
    """
    cards: list[dict[str, Any]] = []
    numbers: dict[tuple[str, str], int] = {}
    for head, body in _monitor.rows_of_two_lines(text, lambda head: len(head[0]) > 1):
        index = numbers[head[0][0], body[0][0]] = len(cards)
        busy, *sizes = re.findall(r"\d+", " ".join(body[2])) or ["-"]
        used, total = sizes[-2:] if len(sizes) >= 2 else (None, None)
        cards.append(
            _monitor.reading(
                index,
                name=" ".join(head[0][1:]),
                bus_id=body[1][0],
                utilization_percent=_monitor.number(busy),
                memory_used=_monitor.size(used, _monitor.MIB),
                memory_total=_monitor.size(total, _monitor.MIB),
                power_w=_monitor.number(head[2][0]),
                temperature_c=_monitor.number(head[2][1]) if len(head[2]) > 1 else None,
                state=head[1][0],
                processes=[],
            )
        )
    for npu, chip, process in re.findall(r"^\|\s+(\d+)\s+(\d+)\s+\|\s+(\d+)\s+\|[^|]*\|", text, re.MULTILINE):
        if (npu, chip) in numbers:
            cards[numbers[npu, chip]]["processes"].append(int(process))
    return cards
