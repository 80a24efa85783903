"""Enflame's management library EFML, by ctypes: it asks the driver within milliseconds, without torch.

Functions and structures are those of the vendor's header ``efml.h`` ("efml next"); the older interface (``EfmlInit``)
is not used.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Iterator

from exp.backends._monitor import reading

__all__ = ["card_of", "count", "readings"]

_LIBRARY = "libefml.so.1"
_INITIALIZERS = ("efmlInit_v2", "efmlInitV2", "efmlInit")  # the newest first; the names vary between releases
_TEXT_LENGTH = 96
_ON_DIE = 0  # EFML_TEMPERATURE_GCU


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gcu", "memory")]


class _PciInfo(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("domain", "bus", "device", "function", "id", "subsystem")),
        ("bus_id", ctypes.c_char * 32),
    ]


@functools.lru_cache(maxsize=None)
def _library() -> Any | None:
    """The library, initialized; None if it is missing, or its driver does not answer.

    It is never shut down: the vendor's plug-in uses it in the same process, and the documentation does not say whether
    initializations are counted.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    initializers = [getattr(library, name) for name in _INITIALIZERS if hasattr(library, name)]
    return library if any(initialize() == 0 for initialize in initializers) else None


def _ask(function: str, *arguments: Any) -> bool:
    """Call a function of the library, which writes to its output arguments; whether it exists and succeeded."""
    library = _library()
    return library is not None and hasattr(library, function) and getattr(library, function)(*arguments) == 0


def count() -> int | None:
    """Number of cards of this host, visible or not; None if the library does not report it."""
    number = ctypes.c_int(0)
    return number.value if _ask("efmlDeviceGetCount_v2", ctypes.byref(number)) else None


def _handles() -> Iterator[tuple[int, Any]]:
    for index in range(count() or 0):
        handle = ctypes.c_void_p()
        if _ask("efmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle)):
            yield index, handle


def _text(function: str, handle: Any) -> str | None:
    text = ctypes.create_string_buffer(_TEXT_LENGTH)
    return text.value.decode("ascii", "replace") or None if _ask(function, handle, text, _TEXT_LENGTH) else None


def card_of(name: str) -> int | None:
    """Number on the host of the card whose UUID begins with ``name``; None if no card or several cards match."""
    found = [card["index"] for card in readings() if name and str(card["uuid"]).startswith(name)]
    return found[0] if len(found) == 1 else None


def readings(card: int | None = None) -> list[dict[str, Any]]:
    """Readings of the cards of this host, as for :meth:`exp.hardware.backend.Backend.monitor`.

    Args:
        card: number on the host of the only card to read; None: all cards.
    """
    return [_reading(index, handle) for index, handle in _handles() if card in (None, index)]


def _reading(index: int, handle: Any) -> dict[str, Any]:
    memory, rates, pci = _Memory(), _Utilization(), _PciInfo()
    power, temperature = ctypes.c_uint(), ctypes.c_int()
    known: dict[str, Any] = {
        "name": _text("efmlDeviceGetName", handle),
        "uuid": _text("efmlDeviceGetUUID", handle),
    }
    if _ask("efmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)):
        known.update(memory_used=memory.used, memory_total=memory.total)
    if _ask("efmlDeviceGetUtilizationRates", handle, ctypes.byref(rates)):
        known["utilization_percent"] = float(rates.gcu)
    if _ask("efmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci)):
        known["bus_id"] = pci.bus_id.decode("ascii", "replace") or None
    if _ask("efmlDeviceGetPowerUsage", handle, ctypes.byref(power)):
        known["power_w"] = power.value / 1000
    if _ask("efmlDeviceGetTemperature", handle, _ON_DIE, ctypes.byref(temperature)):
        known["temperature_c"] = float(temperature.value)
    return reading(index, **known)
