"""Moore Threads' cards: the plug-in ``torch_musa`` (sources of 2.7.1), and mthreads-ml-py (wheel 2.4.3) for readings.

Never run on a card (docs/hardware/hardware.md).
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import replace
from typing import Any, Callable

from exp.backends import _monitor, _probe
from exp.backends.accelerator import AcceleratorBackend

__all__ = ["MusaBackend"]

_VISIBLE = "MUSA_VISIBLE_DEVICES"


class MusaBackend(AcceleratorBackend):
    """Moore Threads' cards, with MCCL for tensors on cards (S4000 only: others train one rank).

    The plug-in goes with one release of torch, which the vendor has patched. ``torchada`` beside it maps the names of
    ``torch.cuda`` onto these cards: do not install it.
    """

    own_type = "musa"
    imports = ("torch_musa",)
    visible_variables = (_VISIBLE,)
    capabilities = replace(
        AcceleratorBackend.capabilities,
        pinned_memory=True,
        reported_env=("MUSA_", "MCCL_", "MUDNN_", "PYTORCH_MUSA_ALLOC_CONF", "TORCH_USE_MUSA_DOUBLE_CAST"),
    )

    def count_by_driver(self) -> int | None:
        """Number of visible cards by the management library, if ``mthreads-ml-py`` is installed."""
        library = _library()
        return None if library is None else _probe.count_visible(library.mtmlLibraryCountDevice(), _VISIBLE)

    def monitor(self) -> list[dict[str, Any]]:
        """Readings through ``mthreads-ml-py``, which lists no processes."""
        library = _library()
        return [] if library is None else [_read(library, index) for index in range(library.mtmlLibraryCountDevice())]


def _library() -> Any:
    """The initialized bindings, or None: they are not installed, or no driver answers."""
    try:
        library = importlib.import_module("pymtml")
        library.mtmlLibraryInit()
    except Exception:  # noqa: BLE001 - the bindings have errors of their own
        return None
    return library


def _read(library: Any, index: int) -> dict[str, Any]:
    card = library.mtmlLibraryInitDeviceByIndex(index)

    def ask(function: Callable[[Any], Any], context: Callable[[Any], Any] = contextlib.nullcontext) -> Any:
        with contextlib.suppress(Exception), context(card) as handle:  # not every card tells everything
            return function(handle)

    power_mw = ask(library.mtmlDeviceGetPowerUsage)
    return _monitor.reading(
        index,
        name=ask(library.mtmlDeviceGetName),
        uuid=ask(library.mtmlDeviceGetUUID),
        serial=ask(library.mtmlDeviceGetSerialNumber),
        utilization_percent=ask(library.mtmlGpuGetUtilization, library.mtmlGpuContext),
        temperature_c=ask(library.mtmlGpuGetTemperature, library.mtmlGpuContext),
        memory_used=ask(library.mtmlMemoryGetUsed, library.mtmlMemoryContext),
        memory_total=ask(library.mtmlMemoryGetTotal, library.mtmlMemoryContext),
        power_w=None if power_mw is None else power_mw / 1000,
    )
