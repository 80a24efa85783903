"""Cards that no file here is written for: what ``torch.accelerator`` (torch >= 2.6) finds, any vendor's.

Nothing is assumed of the card but what torch asks of every plug-in: its type, a number, a current device. Precisions,
random state, memory, identity and collectives are asked for, and done without where there is no answer. A vendor that
needs more derives a class from this one (docs/add-a-backend.md).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any, Sequence

from exp.backends import _probe
from exp.backends._ask_torch import ask, why_hopeless
from exp.backends._probe import AUTOLOAD

from exp.environment import version_of
from exp.errors import ConfigError, UnavailableError
from exp.hardware.backend import FLOAT32, Backend
from exp.plugins import entry_points

if TYPE_CHECKING:
    import torch

__all__ = ["AcceleratorBackend"]

_FIRST = (2, 6)
_PLUGINS = "torch.backends"
_NAMED = {"cuda": "cuda or backend=rocm"}


class AcceleratorBackend(Backend):
    """Cards of the type that ``torch.accelerator`` names; ``device_type`` is known from :meth:`set_device` on.

    ``options`` of the config: ``imports`` and ``visible_variables``, in place of the attributes of that name.

    Raises:
        ConfigError: an option is unknown, or no list.
    """

    precisions = ("fp32", "bf16", "fp16")
    variables: tuple[str, ...] = (AUTOLOAD,)

    imports: tuple[str, ...] = ()
    """Packages to import after torch, where the vendor's does not announce itself to torch (``torch.backends``)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for key, value in self.options.items():
            if key not in ("imports", "visible_variables") or not isinstance(value, (list, tuple)):
                raise ConfigError(
                    f"backend.options.{key}={value}: backend={self.name} has imports=[...] and visible_variables=[...]"
                )
            if value:
                setattr(self, key, tuple(value))
        self.variables = (*self.visible_variables, *self.variables)

    # -- Probing ------------------------------------------------------------------------------------------------------

    def _asked(self) -> tuple[str | None, int, str | None]:
        """What :func:`ask` found; nothing is started where torch can have no accelerator."""
        if why_hopeless(self.imports):
            return None, 0, None
        return ask(self.imports, tuple(map(os.environ.get, (AUTOLOAD, *self.visible_variables))))

    def why_unavailable(self) -> str | None:
        """What is missing: torch 2.6, a plug-in, a card; or the backend that is to be used instead."""
        hopeless = why_hopeless(self.imports)
        if hopeless:
            return hopeless
        kind, count, problem = self._asked()
        off = os.environ.get(AUTOLOAD, "1") != "1" and not self.imports
        hint = f"; {AUTOLOAD}={os.environ[AUTOLOAD]} keeps plug-ins from loading: unset it" if off else ""
        if problem:
            check = _probe.built_for_another(problem) or "check the vendor's driver and library path"
            return f"torch cannot tell its accelerator ({problem}); {check}{hint}"
        if kind is None:
            return f"torch.accelerator names no device{hint or '; install the plug-in that goes with this torch'}"
        if kind in _NAMED:
            return f"torch's device here is {kind}; use backend={_NAMED[kind]}{hint}"
        if count == 0:
            return f"torch is built for {kind}, but counts no card; check the driver and its visible-devices variable"
        return None

    def device_count(self) -> int:
        """Cards that torch counts, the vendor's own variables respected; asked once per process."""
        return self._asked()[1]

    @property
    def title(self) -> str:
        """With torch's name of the card."""
        kind = self._asked()[0]
        return f"{self.name} ({kind}, through torch.accelerator)" if kind else self.name

    def worker_env(self, local_rank: int, local_world_size: int, single_node: bool) -> dict[str, str]:
        """The plug-in announces itself to torch by being loaded with it."""
        return {AUTOLOAD: "1", **super().worker_env(local_rank, local_world_size, single_node)}

    def packages(self) -> dict[str, str | None]:
        """The packages that announce a device to torch, and those that are imported for one."""
        announced = (point.value.partition(":")[0] for point in entry_points(_PLUGINS).values())
        names = dict.fromkeys(name.partition(".")[0] for name in (*announced, *self.imports))
        return {name: version_of(name) for name in names}

    # -- Device -------------------------------------------------------------------------------------------------------

    def cautions(self) -> list[str]:
        """A backend of its own for this device: it knows what nobody can ask, such as operators that are missing."""
        found = []
        for name, point in entry_points("exp.backends").items():
            with contextlib.suppress(Exception):  # another's package may raise anything while it loads
                if name != self.name and point.load().device_type == self.device_type:
                    found.append(f"there is a backend for this card alone, which knows more of it; use backend={name}")
        return found

    @property
    def _module(self) -> Any:
        """``torch.<device type>``."""
        import torch

        return torch.get_device_module(self.device_type)

    def _call(self, *names: str, args: Sequence[Any] = ()) -> Any:
        """What the first of these functions of the device's module tells; None: it has none, or does not know.

        Arguments go by place: vendors give them names of their own.
        """
        for name in names:
            function = getattr(self._module, name, None)
            if function is not None:
                try:
                    return function(*args)
                except (AssertionError, AttributeError, NotImplementedError, RuntimeError, TypeError):
                    continue
        return None

    def set_device(self, local_rank: int) -> torch.device:
        """Select the card of torch's accelerator that has this number."""
        import torch

        for name in self.imports:
            importlib.import_module(name)
        device = torch.accelerator.current_accelerator()
        count = 0 if device is None else torch.accelerator.device_count()
        if device is None or local_rank >= count:
            raise UnavailableError(
                f"local_rank {local_rank} has no card: torch.accelerator counts {count} ({device or 'no device'}); "
                "lower nproc, or set the vendor's visible-devices variable"
            )
        self.device_type = device.type
        select = getattr(torch.accelerator, "set_device_index", None) or torch.accelerator.set_device_idx
        select(local_rank)
        return torch.device(device.type, local_rank)

    def seed(self, seed: int) -> None:
        """Seed every visible card, where the module can."""
        seed_all = getattr(self._module, "manual_seed_all", None) or getattr(self._module, "manual_seed", None)
        if seed_all is not None:
            seed_all(seed)

    def rng_state(self) -> torch.Tensor | None:
        """State of the current card's generator."""
        if not hasattr(self._module, "get_rng_state"):
            return None
        state: torch.Tensor = self._module.get_rng_state()
        return state.cpu()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore the current card's generator."""
        self._module.set_rng_state(state)

    def synchronize(self) -> None:
        """Wait for the current card; one whose module has no such function is never ahead of the process."""
        wait = getattr(self._module, "synchronize", None)
        if wait is not None:
            wait()

    def memory(self) -> dict[str, int]:
        """Bytes on the current card, as far as its module tells."""
        found = {
            "allocated": self._call("memory_allocated", "current_allocated_memory"),
            "max_allocated": self._call("max_memory_allocated"),
            "total": (self.free_memory() or (None, None))[1],
        }
        return {key: int(value) for key, value in found.items() if value is not None}

    def free_memory(self) -> tuple[int, int] | None:
        """Of the current card."""
        import torch

        sizes = self._call("mem_get_info")
        if sizes is None and hasattr(torch.accelerator, "get_memory_info"):
            try:
                sizes = torch.accelerator.get_memory_info()
            except RuntimeError:  # the plug-in has no such call
                return None
        return None if sizes is None else (int(sizes[0]), int(sizes[1]))

    def describe(self, device: torch.device) -> dict[str, Any]:
        """Name and index of the card, and as far as they are told its memory in bytes, UUID and number on the host."""
        properties = self._call("get_device_properties", args=(device.index,))
        name = getattr(properties, "name", None) or self._call("get_device_name") or device.type
        found = {"name": str(name), "index": device.index}
        for key, attribute in (("memory", "total_memory"), ("uuid", "uuid")):
            value = getattr(properties, attribute, None)
            if value is not None:
                found[key] = value if isinstance(value, int) else str(value)
        if any(variable in os.environ for variable in self.visible_variables):
            found["visible"] = _probe.visible_name(device.index, *self.visible_variables)
        return found

    def close(self) -> None:
        """Run what packages have registered for the interpreter's end: some vendors shut the device down there."""
        atexit._run_exitfuncs()

    # -- Collectives and precision ------------------------------------------------------------------------------------

    @property
    def default_process_group(self) -> str:
        """What torch has for this type, and gloo for the CPU; ``undefined`` where no plug-in has said."""
        import torch.distributed as dist

        try:
            library = dist.get_default_backend_for_device(self.device_type)
        except ValueError:
            library = "undefined"
        return f"cpu:gloo,{self.device_type}:{library}"

    def collectives_missing(self) -> str | None:
        """Whether torch knows the library that is to carry this card's tensors."""
        import torch.distributed as dist

        from exp.hardware.compat import device_part_of

        library = device_part_of(self.process_group, self.device_type)
        if library != "undefined" and dist.is_backend_available(library):
            return None
        return f"no package has registered collectives for {self.device_type} with torch ({library})"

    def supports(self, precision: str) -> bool:
        """Whether the card says that it has the type itself, and a product under autocast comes out in it."""
        if precision in FLOAT32 or precision not in self.precisions:
            return precision in self.precisions
        if precision == "bf16" and not self._says_bf16():
            return False
        import torch

        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's way to say that autocast stays off
                ones = torch.ones(8, 8, device=self.device_type)
                with self.autocast(precision):
                    product = ones @ ones
                return product.dtype == dtype and bool((product.float().cpu() == 8).all())
        except (AssertionError, NotImplementedError, RuntimeError, TypeError):
            return False

    def grad_scaler(self, precision: str) -> Any | None:
        """The vendor's scaler where the module has one: some cards overflow in a way of their own."""
        own = getattr(getattr(self._module, "amp", None), "GradScaler", None)
        return own() if precision == "fp16" and own is not None else super().grad_scaler(precision)

    def _says_bf16(self) -> bool:
        """False only where the module denies it; computing it by way of float32 does not count."""
        ask = getattr(self._module, "is_bf16_supported", None)
        if ask is None:
            return True
        try:
            return bool(ask(including_emulation=False))
        except TypeError:  # it does not tell the two apart
            return bool(ask())
