"""Cards of any vendor that ``torch.accelerator`` (torch >= 2.6) finds.

Only what torch requires of every plug-in is needed: a device type, a count, a current device. Precisions, random state,
memory, identity and collectives are used if the plug-in has them. A vendor that needs more derives a class from this
one (docs/extend/add-a-backend.md).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Sequence

from exp.backends import _probe
from exp.backends._probe import AUTOLOAD

from exp.errors import ConfigError, UnavailableError
from exp.hardware.backend import FLOAT32, Backend, Capabilities, Collectives, call_if_present
from exp.hardware.environment import version_of
from exp.plugins import entry_points

if TYPE_CHECKING:
    import torch

__all__ = ["AcceleratorBackend", "is_built_in"]

_FIRST = (2, 6)
_PLUGINS = "torch.backends"
_ASK = """
import importlib, json, torch
for name in {imports}:
    importlib.import_module(name)
device = torch.accelerator.current_accelerator()
print("answer", json.dumps([device and device.type, torch.accelerator.device_count() if device else 0]))
"""
_NAMED = {"cuda": "cuda or backend=rocm"}


class AcceleratorBackend(Backend, options=("imports", "visible_variables")):
    """Cards of the type that ``torch.accelerator`` names; :meth:`set_device` sets ``device_type``.

    The constructor returns the class of the vendor whose cards torch could have here, if it has a file of its own.

    ``options`` of the config: ``imports`` and ``visible_variables``, which replace the attributes of these names.

    Raises:
        ConfigError: an option is unknown, or is not a list.
    """

    capabilities = Capabilities(precisions=("fp32", "bf16", "fp16"), reported_env=(AUTOLOAD,))
    collectives = Collectives("cpu:gloo")
    imports: tuple[str, ...] = ()
    """Packages to import after torch, if the vendor's package has no entry point in ``torch.backends``."""
    own_type: str | None = None
    """Torch's device type of the one vendor whose class this is; None: whatever torch finds.

    Torch then loads no plug-in by itself but those of :attr:`imports`: two in one process refuse each other."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> AcceleratorBackend:
        """Choose the class of a vendor by what is installed."""
        if cls is AcceleratorBackend:
            for module, name, is_here in _VENDORS:
                if is_here():
                    vendor: type[AcceleratorBackend] = getattr(importlib.import_module(f"exp.backends.{module}"), name)
                    return super().__new__(vendor)
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for key, value in self.options.items():
            if not isinstance(value, (list, tuple)):
                raise ConfigError(f"backend.options.{key}={value} must be a list", f"write backend.options.{key}=[...]")
            if value:
                setattr(self, key, tuple(value))

    # -- Detection ----------------------------------------------------------------------------------------------------

    def _query_torch(self) -> tuple[str | None, int, str | None]:
        """Torch's device type, the number of cards, and why there is no answer.

        Torch is asked in a process of its own, and not at all if it cannot have an accelerator.
        """
        if self._why_hopeless():
            return None, 0, None
        counted = self.count_by_driver()
        if counted is not None:
            return self.own_type, counted, None
        environment = tuple(map(os.environ.get, (AUTOLOAD, *self.visible_variables)))
        script = _ASK.format(imports=list(self.imports))
        autoload = "0" if self.own_type else os.environ.get(AUTOLOAD, "1")
        answer, problem = _probe.ask_torch(script, autoload, environment)
        kind, count = answer or (None, 0)
        return kind, count, problem

    def count_by_driver(self) -> int | None:
        """Number of visible cards by the vendor's own library, within milliseconds; None: torch must be asked."""
        return None

    def _why_hopeless(self) -> str | None:
        """Why torch cannot have this accelerator, or None if it must be asked; takes milliseconds."""
        return _why_hopeless(self.imports)

    def unavailable_reason(self) -> str | None:
        """What is missing (torch 2.6, a plug-in, a card), or which backend to use instead; None: nothing is missing."""
        hopeless = self._why_hopeless()
        if hopeless:
            return hopeless
        kind, count, problem = self._query_torch()
        off = os.environ.get(AUTOLOAD, "1") != "1" and not self.imports and not self.own_type
        hint = f"; {AUTOLOAD}={os.environ[AUTOLOAD]} keeps plug-ins from loading: unset it" if off else ""
        if problem:
            check = _probe.built_for_another(problem) or "check the vendor's driver and library path"
            return f"torch cannot tell its accelerator ({problem}); {check}{hint}"
        if kind is None:
            return f"torch.accelerator names no device{hint or '; install the plug-in that goes with this torch'}"
        if kind in _NAMED or self.own_type not in (kind, None):
            return f"torch's device here is {kind}; use backend={_NAMED.get(kind, kind)}{hint}"
        if count == 0:
            return (
                f"torch is built for {kind}, but counts no card; check the driver and "
                f"{' and '.join(self.visible_variables) or 'its visible-devices variable'}"
            )
        return None

    def device_count(self) -> int:
        """Number of cards that torch counts, with the vendor's visible-devices variables; asked once per process."""
        return self._query_torch()[1]

    def __str__(self) -> str:
        """Name for the terminal, with torch's device type."""
        kind = self._query_torch()[0]
        return f"{self.name} ({kind}, through torch.accelerator)" if kind else self.name

    def worker_env(self, local_rank: int, local_world_size: int, single_node: bool) -> dict[str, str]:
        """Let torch load the plug-ins that have an entry point (TORCH_DEVICE_BACKEND_AUTOLOAD=1), or none of them."""
        autoload = "0" if self.own_type else "1"
        return {AUTOLOAD: autoload, **super().worker_env(local_rank, local_world_size, single_node)}

    def packages(self) -> dict[str, str | None]:
        """Versions of the packages with an entry point in ``torch.backends``, and of those in ``imports``."""
        announced = (point.value.partition(":")[0] for point in entry_points(_PLUGINS).values())
        names = dict.fromkeys(name.partition(".")[0] for name in (*announced, *self.imports))
        return {name: version_of(name) for name in names}

    # -- Device -------------------------------------------------------------------------------------------------------

    def set_device(self, local_rank: int) -> torch.device:
        """Select card number ``local_rank`` of torch's accelerator.

        Raises:
            UnavailableError: torch counts no such card.
        """
        import torch
        import torch.distributed as dist

        for name in self.imports:
            importlib.import_module(name)
        device = torch.accelerator.current_accelerator()
        count = 0 if device is None else torch.accelerator.device_count()
        if device is None or local_rank >= count:
            raise UnavailableError(
                f"local_rank {local_rank} has no card: torch.accelerator counts {count} ({device or 'no device'})",
                "lower nproc, or set the vendor's visible-devices variable",
            )
        self.device_type = device.type
        library = "undefined"
        with contextlib.suppress(ValueError):  # no plug-in has registered collectives
            library = dist.get_default_backend_for_device(device.type)
        self.collectives = Collectives(f"cpu:gloo,{device.type}:{library}")
        select = getattr(torch.accelerator, "set_device_index", None) or torch.accelerator.set_device_idx
        select(local_rank)
        return torch.device(device.type, local_rank)

    def usage(self) -> dict[str, Any]:
        """Memory as the device's module reports it; of the whole card also as torch.accelerator does (torch >= 2.9)."""
        memory = super().usage()
        if "total" not in memory:
            import torch

            memory["free"], memory["total"] = call_if_present(torch.accelerator, "get_memory_info") or (None, None)
        return {name: value for name, value in memory.items() if value is not None}

    def device_info(self, device: torch.device) -> dict[str, Any]:
        """Also ``visible``, the card's entry in the visible-devices variable, or None."""
        return {**super().device_info(device), "visible": _probe.visible_name(device.index, *self.visible_variables)}

    def supports(self, precision: str) -> bool:
        """Whether the card reports native support, and a product under autocast has the right dtype and values."""
        if precision in FLOAT32 or precision not in self.capabilities.precisions:
            return super().supports(precision)
        # Native support without slow emulation. Some modules do not take this argument, some have no such function.
        answers = [call_if_present(self.torch_module, "is_bf16_supported", *arguments) for arguments in ((False,), ())]
        if precision == "bf16" and not next((answer for answer in answers if answer is not None), True):
            return False
        import torch

        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns if autocast stays off
                ones = torch.ones(8, 8, device=self.device_type)
                with self.autocast(precision):
                    product = ones @ ones
                return product.dtype == dtype and bool((product.float().cpu() == 8).all())
        except (AssertionError, NotImplementedError, RuntimeError, TypeError):
            return False


def is_built_in(device_type: str) -> bool:
    """Whether torch itself was built for a device, so that there is no plug-in with an entry point; imports nothing."""
    spec = util.find_spec("torch")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any(list(Path(folder, "lib").glob(f"libtorch_{device_type}*")) for folder in folders)


def _is_installed(package: str) -> Callable[[], bool]:
    return lambda: util.find_spec(package) is not None


_VENDORS: Sequence[tuple[str, str, Callable[[], bool]]] = (
    ("npu", "NpuBackend", _is_installed("torch_npu")),
    ("musa", "MusaBackend", _is_installed("torch_musa")),
    ("mlu", "MluBackend", _is_installed("torch_mlu")),
    ("xpu", "XpuBackend", lambda: is_built_in("xpu")),
    ("mps", "MpsBackend", lambda: sys.platform == "darwin"),
)
"""Module, class, and whether torch could have such cards here."""


def _why_hopeless(imports: tuple[str, ...]) -> str | None:
    """Why torch cannot have an accelerator, or None if it must be asked; takes milliseconds.

    Args:
        imports: packages that would be imported first.
    """
    version = _probe.torch_build()["version"] or "0.0"
    if tuple(int(part) for part in version.split(".")[:2]) < _FIRST:
        return f"looked for torch.accelerator, which torch has from 2.6 on, and found torch {version}; update it"
    absent = [name for name in imports if util.find_spec(name.partition(".")[0]) is None]
    if absent:
        return f"looked for the package {absent[0]} in {sys.executable} and found none; install it"
    if imports or entry_points(_PLUGINS) or is_built_in("xpu"):
        return None
    return (
        f"torch {version} is built for no card that torch.accelerator could name, and no package announces one to "
        f"it (entry points '{_PLUGINS}' in {sys.executable}); install the vendor's plug-in, or name one that does "
        "not announce itself: 'backend.options.imports=[torch_<vendor>]'"
    )
