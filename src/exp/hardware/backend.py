"""The backend interface: everything that differs between hardware families, on one page.

A hardware family is one subclass of :class:`Backend` in one file, plus one YAML file that names it by ``_target_``.
Backends outside this repository register a class through the entry-point group ``exp.backends`` or are named by
``_target_`` in a config of the user's own (docs/extend/add-a-backend.md).

This module, and every backend module, must import without torch: the parent process composes and validates the
configuration with it, and never pays for torch or holds a device. Methods that are called in a worker import torch
inside.
"""

from __future__ import annotations

import abc
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ContextManager, Mapping, Sequence

from exp.config.schema import FLOAT32, PRECISIONS
from exp.errors import ConfigError, UnavailableError
from exp.hardware.collectives import Collectives
from exp.hardware.cores import usable_cores

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["FLOAT32", "PRECISIONS", "Backend", "Capabilities", "Collectives", "ask"]


@dataclass(frozen=True)
class Capabilities:
    """What the cards of a family can do. The defaults are what is always right: nothing beyond float32."""

    precisions: tuple[str, ...] = ("fp32",)
    """Of :data:`PRECISIONS`, those that some card of the family has; :meth:`Backend.supports` asks the card."""

    fused_attention: tuple[str, ...] = ()
    """Precisions in which ``scaled_dot_product_attention`` may take its fused forms."""

    lacking_operators: frozenset[str] = frozenset()
    """ATen overloads without a kernel, such as ``"convolution_backward"``: they run on the CPU, or not at all."""

    uncompiled: str | None = None
    """Why ``compile=true`` is refused; None: torch is asked, with a first small computation."""

    sync_batchnorm: bool = False
    """torch's SyncBatchNorm runs on these cards."""

    pinned_memory: bool = False
    """Host memory can be page-locked, so that copies from it and to it run beside the computation, on a stream of their
    own where ``torch.<device_type>`` has streams."""

    forking: bool = False
    """Workers may be forked from a process that has imported torch and MMEngine: nothing that loads with them starts
    threads or opens a device."""

    simulation: bool = False
    """There are simulated cards (``backend.simulate=true``)."""


class Backend(abc.ABC):
    """One hardware family. A class must set ``device_type`` and ``collectives`` and write the abstract methods.

    Args:
        name: what the user calls it, for messages and records (``"cpu"``).
        process_group: in place of that of :attr:`collectives`.
        env: environment variables for the workers, set before torch is imported. They win over the backend's own
            defaults, and lose to what the user has exported in the shell.
        options: settings that only this backend understands.
        allow_fallback: copy tensors through the CPU, over gloo, where the device's own collectives are missing.
        simulate: use simulated devices.

    Raises:
        ConfigError: ``simulate`` for a backend that has none.
    """

    device_type: str
    """torch's device type, such as ``"cpu"``."""

    collectives: Collectives
    """How ranks exchange tensors of this device, such as ``Collectives("cpu:gloo,<device>:<library>")``."""

    capabilities: Capabilities = Capabilities()
    """What the cards can do; after :meth:`set_device`, the card of this rank."""

    exclusive_devices: bool = True
    """Whether each rank needs a device of its own. False only where ranks share one (the CPU)."""

    visible_variables: tuple[str, ...] = ()
    """Environment variables that choose the cards which a process sees, by a list; the first that is set counts."""

    variables: tuple[str, ...] = ()
    """Environment variables that change how this family behaves, for reports. None that may hold a secret."""

    def __init__(
        self,
        name: str,
        process_group: str | None = None,
        env: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        allow_fallback: bool = False,
        simulate: bool = False,
    ) -> None:
        self.name = name
        self.requested_process_group = process_group
        self.env = dict(env or {})
        self.options = dict(options or {})
        self.allow_fallback = allow_fallback
        self.simulate = simulate
        if simulate and not self.capabilities.simulation:
            raise ConfigError(f"backend.simulate=true: there are no simulated devices of backend={name}; leave it out")

    def __str__(self) -> str:
        """For the terminal."""
        return self.name

    # -- Called by the parent: no torch, no device context; never raises -----------------------------------------------

    @abc.abstractmethod
    def why_unavailable(self) -> str | None:
        """None when usable here; else what was looked for, what was found and how to get it."""

    @abc.abstractmethod
    def device_count(self) -> int:
        """Number of devices that this process may use (visible-device variables respected)."""

    def worker_env(self, local_rank: int, local_world_size: int, single_node: bool) -> dict[str, str]:
        """Environment of one worker, set before torch is imported; what the user has exported wins over it.

        Args:
            local_rank: of the worker on its node.
            local_world_size: workers on this node.
            single_node: whether the job stays on this node, so that nothing need leave the loopback interface.

        Returns:
            Here, this worker's share of the cores, and ``env`` of the config; subclasses put their defaults before it.
        """
        return {"OMP_NUM_THREADS": str(max(1, usable_cores() // local_world_size)), **self.env}

    def run_env(self, precision: str, counts_fallbacks: bool) -> dict[str, str]:
        """What a run needs in its workers before torch is imported; set over what the user has exported.

        Args:
            precision: of the run.
            counts_fallbacks: whether :meth:`fallbacks` will be asked.

        Raises:
            ConfigError: the user's exports say the opposite of ``precision``.
        """
        return {}

    def packages(self) -> dict[str, str | None]:
        """Versions of the vendor's packages, libraries and driver by name, for reports; None: not installed."""
        return {}

    def monitor(self) -> list[dict[str, Any]]:
        """What the vendor's monitor says of every card of this host, visible or not; empty where there is none.

        Returns:
            Per card ``index`` (on the host), ``name``, ``uuid``, ``bus_id``, ``utilisation_percent``, ``memory_used``
            and ``memory_total`` (bytes), ``temperature_c``, ``power_w``, ``state``, ``serial``; None for what it does
            not report.
        """
        return []

    # -- Called by a worker: torch is imported from here on -----------------------------------------------------------

    @property
    def module(self) -> Any:
        """Torch's functions for this device, ``torch.<device_type>``; what it lacks is done without.

        Used are ``device_count``, ``set_device``, ``synchronize``, ``manual_seed_all``, ``get_rng_state``,
        ``set_rng_state``, ``memory_allocated``, ``max_memory_allocated``, ``mem_get_info``, ``get_device_properties``,
        ``Event`` and ``amp.GradScaler``.
        """
        import torch

        return getattr(torch, self.device_type, None)

    def set_device(self, local_rank: int) -> torch.device:
        """Select the device of this rank and return it; a plug-in of the vendor's is imported here.

        Raises:
            UnavailableError: ``local_rank`` is not below the number of devices that torch sees.
        """
        import torch

        module = self.module
        count = module.device_count()
        if local_rank >= count:
            raise UnavailableError(
                f"local_rank {local_rank} has no card: torch sees {count} of backend={self.name}; lower nproc, or "
                f"correct {self.visible_variables[0] if self.visible_variables else 'the visible devices'}"
            )
        module.set_device(local_rank)
        return torch.device(self.device_type, local_rank)

    def describe(self, device: torch.device) -> dict[str, Any]:
        """``{"name", "index"}`` and what else is known of one device, for the run record.

        ``uuid``, ``serial``, ``bus_id`` or ``card`` (its number on the host, visible or not) tell cards apart, as far
        as they are known; where none is, ``visible``, its name in the visible-devices variable
        (:mod:`exp.hardware.cards`).
        """
        properties = ask(self.module, "get_device_properties", device.index)
        name = getattr(properties, "name", None) or ask(self.module, "get_device_name", device.index) or device.type
        found = {"name": str(name), "index": device.index}
        for key, attribute in (("memory", "total_memory"), ("uuid", "uuid")):
            value = getattr(properties, attribute, None)
            if value is not None:
                found[key] = value if isinstance(value, int) else str(value)
        return found

    def cautions(self) -> list[str]:
        """Of the environment, what does not do what the user may expect on this rank's device, a line each.

        Shown at the start of a run and by the doctor.
        """
        return []

    def usage(self) -> dict[str, Any]:
        """How full and how busy the current device is; asked in a training every ``log_every`` steps.

        Returns:
            As far as the device tells within milliseconds: ``allocated`` and ``max_allocated`` (bytes of this process),
            ``free`` and ``total`` (bytes, other processes' use counted), ``utilisation_percent`` (of the last moments).
        """
        module = self.module
        free, total = ask(module, "mem_get_info") or (None, None)
        allocated, most = ask(module, "memory_allocated"), ask(module, "max_memory_allocated")
        found = {"allocated": allocated, "max_allocated": most, "free": free, "total": total}
        return {name: int(value) for name, value in found.items() if value is not None}

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        wait = getattr(self.module, "synchronize", None)
        if wait is not None:
            wait()

    def end_step(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | None = None,
        outputs: Sequence[torch.Tensor] = (),
        **kwargs: Any,
    ) -> None:
        """Take the optimizer's step; lazy devices also end their graph here. Called once per step at any precision.

        With a loss scaler, ``optimizer.step`` is the scaler's, which may leave the update out.

        Args:
            optimizer: takes its step.
            model: what is trained; None: not known.
            outputs: tensors of this step that are read, or added up, later, such as its loss.
            **kwargs: of ``optimizer.step``.
        """
        optimizer.step(**kwargs)

    def end_batch(self, outputs: Any = None) -> None:
        """End one batch of an evaluation; lazy devices run their graph here.

        Args:
            outputs: of the model, in whatever structure; what is computed of them is small.
        """

    def close(self) -> None:
        """What the vendor does when the interpreter ends; a worker ends right after this, without the interpreter's."""

    def supports(self, precision: str) -> bool:
        """Whether this rank's device trains in ``precision`` (one of :data:`PRECISIONS`)."""
        return precision in self.capabilities.precisions

    def set_precision(self, precision: str) -> None:
        """Have this process multiply float32 values in full, or as TF32 where ``precision`` is ``tf32``.

        Called before the first product. The switches that a family has beside torch's general one are set in its file.

        Raises:
            ConfigError: the environment overrules it.
        """
        import torch

        if hasattr(torch, "set_float32_matmul_precision"):  # torch >= 1.12
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")

    def autocast(self, precision: str) -> ContextManager[Any]:
        """Context manager for the forward pass; does nothing for :data:`FLOAT32`."""
        if precision in FLOAT32:
            return contextlib.nullcontext()
        import torch

        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        return torch.autocast(self.device_type, dtype=dtype)

    def fallbacks(self) -> Mapping[str, tuple[int, int]] | None:
        """What has left the device in this process so far: calls and bytes (there and back) by ATen name.

        None: nothing tells. Bytes are 0 where only calls are counted.
        """
        return None


def ask(module: Any, name: str, *arguments: Any) -> Any:
    """What a function of a device's module gives; None: it has none, or does not know.

    Arguments go by place: vendors give them names of their own.
    """
    function = getattr(module, name, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except (AssertionError, AttributeError, NotImplementedError, RuntimeError, TypeError):
        return None
