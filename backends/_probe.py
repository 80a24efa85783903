"""Asks the machine about cards without importing torch or making a device context."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from pathlib import Path

__all__ = ["count_visible", "nvml_device_count", "torch_build", "torch_missing"]


def torch_missing() -> str | None:
    """Why torch cannot be used, or None."""
    if importlib.util.find_spec("torch") is None:
        return f"torch is not installed for {sys.executable}; install the build for this device"
    return None


def torch_build() -> dict[str, str | None]:
    """``version``, ``cuda`` and ``hip`` of the installed torch, read from its ``version.py`` without importing it."""
    spec = importlib.util.find_spec("torch")
    found: dict[str, str | None] = {"version": None, "cuda": None, "hip": None}
    if spec is None or not spec.submodule_search_locations:
        return found
    text = (Path(next(iter(spec.submodule_search_locations))) / "version.py").read_text(encoding="utf-8")
    for match in re.finditer(r"^(?:__)?(version|cuda|hip)(?:__)?(?:\s*:[^=]*)?\s*=\s*'([^']*)'", text, re.MULTILINE):
        found[match.group(1)] = match.group(2)
    return found


def nvml_device_count() -> int:
    """Cards that NVIDIA's management library counts; 0 where it is missing or its driver does not answer."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    count = ctypes.c_uint(0)
    status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return count.value if status == 0 else 0


def count_visible(total: int, *variables: str) -> int:
    """How many of ``total`` cards the first of ``variables`` that is set leaves visible.

    A list ends at its first number that is no card, as the drivers read it; names (uuids) are taken as they are.
    """
    for variable in variables:
        value = os.environ.get(variable)
        if value is None:
            continue
        visible = 0
        for item in value.split(","):
            item = item.strip()
            if not item or (item.lstrip("-").isdigit() and not 0 <= int(item) < total):
                break
            visible += 1
        return min(visible, total)
    return total
