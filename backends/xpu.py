"""Intel cards: part of torch's own XPU builds; readings through ``pyzes`` (0.1.3, its wheel).

Never run on a card (docs/hardware/hardware.md).
"""

from __future__ import annotations

import ctypes
import importlib
import os
from dataclasses import replace
from typing import Any, Callable

from exp.backends import _monitor, _probe
from exp.backends.accelerator import AcceleratorBackend, is_built_in

__all__ = ["XpuBackend"]

_MASK = "ZE_AFFINITY_MASK"


class XpuBackend(AcceleratorBackend):
    """Intel cards, with XCCL (torch >= 2.8) for tensors on cards.

    ``averages`` stays off: the collectives divide averages of small tensors twice (torch-xpu-ops 3020).
    """

    own_type = "xpu"
    visible_variables = (_MASK,)
    capabilities = replace(
        AcceleratorBackend.capabilities,
        pinned_memory=True,
        reported_env=("ZE_", "SYCL_", "ONEAPI_", "CCL_", "UR_"),
    )

    def _why_hopeless(self) -> str | None:
        if not is_built_in("xpu"):
            version = _probe.torch_build()["version"]
            return f"torch {version} is built without XPU; install the XPU build of torch (PyTorch's own index)"
        return super()._why_hopeless()

    def count_by_driver(self) -> int | None:
        """Number of visible cards by Level Zero, if ``pyzes`` is installed and the mask names no tiles (``0.1``)."""
        cards = _cards()
        return None if cards is None or "." in os.environ.get(_MASK, "") else _probe.count_visible(len(cards[1]), _MASK)

    def monitor(self) -> list[dict[str, Any]]:
        """Readings through ``pyzes``; it counts busy time, of which one reading tells no utilization."""
        cards = _cards()
        return [] if cards is None else [_read(cards[0], card, index) for index, card in enumerate(cards[1])]


def _cards() -> tuple[Any, list[Any]] | None:
    """The bindings and the handles of all cards; None: not installed, or no driver answers."""
    try:
        library = importlib.import_module("pyzes")
        if library.zesInit(0) != library.ZE_RESULT_SUCCESS:
            return None
        drivers = _list(library.zesDriverGet, library.zes_driver_handle_t)
        return library, [
            card for driver in drivers for card in _list(library.zesDeviceGet, library.zes_device_handle_t, driver)
        ]
    except Exception:  # noqa: BLE001 - the bindings raise it where they find no driver
        return None


def _list(function: Callable[..., Any], make: Callable[[], Any], *owner: Any) -> list[Any]:
    """What ``function`` lists, which it writes into an array of ``make()``; it is asked for the number first."""
    count = ctypes.c_uint32(0)
    if function(*owner, ctypes.byref(count), None) != 0:
        return []
    items = [make() for _ in range(count.value)]
    array = (type(make()) * count.value)(*items)
    return list(array) if function(*owner, ctypes.byref(count), array) == 0 else []


def _read(library: Any, card: Any, index: int) -> dict[str, Any]:
    described = library.zes_device_properties_t(stype=library.ZES_STRUCTURE_TYPE_DEVICE_PROPERTIES)
    described_card = library.zesDeviceGetProperties(card, ctypes.byref(described)) == 0
    sizes = []
    for module in _list(library.zesDeviceEnumMemoryModules, library.zes_mem_handle_t, card):
        state = library.zes_mem_state_t(stype=library.ZES_STRUCTURE_TYPE_MEM_STATE)
        if library.zesMemoryGetState(module, ctypes.byref(state)) == 0:
            sizes.append((state.size - state.free, state.size))
    users = _list(
        library.zesDeviceProcessesGetState,
        lambda: library.zes_process_state_t(stype=library.ZES_STRUCTURE_TYPE_PROCESS_STATE),
        card,
    )
    temperatures = []
    for sensor in _list(library.zesDeviceEnumTemperatureSensors, library.zes_temp_handle_t, card):
        degrees = ctypes.c_double()
        if library.zesTemperatureGetState(sensor, ctypes.byref(degrees)) == 0:
            temperatures.append(degrees.value)
    return _monitor.reading(
        index,
        name=described.core.name.decode() if described_card else None,
        uuid=bytes(described.core.uuid.id).hex() if described_card else None,
        serial=described.serialNumber.decode() or None if described_card else None,
        memory_used=sum(used for used, _ in sizes) if sizes else None,
        memory_total=sum(total for _, total in sizes) if sizes else None,
        temperature_c=max(temperatures, default=None),
        processes=[user.processId for user in users],
    )
