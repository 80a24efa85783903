"""The backend interface: everything that differs between hardware families.

A hardware family is one subclass of :class:`Backend` in one file, plus one YAML file that names it by ``_target_``.
Backends outside this repository register a class through the entry-point group ``exp.backends``, or a user's YAML file
names them by ``_target_`` (docs/extend/add-a-backend.md). Training code calls :meth:`Backend.set_device`,
:meth:`Backend.process_group` and :meth:`Backend.ddp_kwargs` instead of one vendor's functions.

This module and all backend modules must not import torch at the top: the parent process uses them to validate the
configuration, and must neither load torch nor hold a device. Methods that workers call import torch inside.
"""

from __future__ import annotations

import abc
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ContextManager, Mapping, Sequence

from exp.config.schema import FLOAT32, PRECISIONS
from exp.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch import nn
    from torch.distributed import Store

__all__ = [
    "FLOAT32", "PRECISIONS", "PROCESS_GROUP_VARIABLE", "Backend", "Capabilities", "Collectives", "call_if_present",
    "device_backend", "usable_cores",
]  # fmt: skip


PROCESS_GROUP_VARIABLE = "TORCH_DISTRIBUTED_BACKEND"


@dataclass(frozen=True)
class Capabilities:
    """The features of the cards of a family. The defaults are safe for any card: float32 only, no optional feature.

    Attributes:
        precisions: those of :data:`PRECISIONS` that some card of the family has; :meth:`Backend.supports` asks the
            actual card.
        fused_attention: precisions in which ``scaled_dot_product_attention`` may use its fused kernels.
        lacking_operators: ATen overloads without a kernel, such as ``"convolution_backward"``; they run on the CPU, or
            fail.
        uncompiled: why ``compile=true`` is refused; None: a small test computation decides.
        sync_batchnorm: whether torch's SyncBatchNorm runs on these cards.
        pinned_memory: whether host memory can be page-locked. Copies then overlap with computation, on a stream of
            their own if ``torch.<device_type>`` has streams.
        shared_device: whether all ranks share one device (the CPU); otherwise each rank needs its own.
        reported_env: prefixes of environment variables that change how the family behaves, for reports, besides the
            visible-devices variables. None may be the prefix of a variable with a secret.
        forking: whether workers may be forked from a process that has imported torch and MMEngine. Nothing that is
            imported with them may start threads or open a device.
        simulation: whether there are simulated cards (``backend.simulate=true``).
    """

    precisions: tuple[str, ...] = ("fp32",)

    fused_attention: tuple[str, ...] = ()

    lacking_operators: frozenset[str] = frozenset()

    uncompiled: str | None = None

    sync_batchnorm: bool = False

    pinned_memory: bool = False

    shared_device: bool = False

    reported_env: tuple[str, ...] = ()

    forking: bool = False

    simulation: bool = False


class Collectives:
    """Collectives of ``torch.distributed``; a vendor whose package has its own collectives derives a class.

    Args:
        process_group: backend string for torch >= 2.0, CPU tensors included: ``"cpu:gloo,<device>:<library>"``.
        averages: whether the process group supports ``ReduceOp.AVG``.
        gloo: whether gloo accepts tensors on this device. Otherwise they are copied through the CPU.
    """

    staged_bytes = 0
    """Bytes that this process has copied for sums from its device to the CPU and back."""

    def __init__(self, process_group: str, averages: bool = False, gloo: bool = False) -> None:
        self.process_group = process_group
        self.averages = averages
        self.gloo = gloo

    def missing(self, process_group: str, device_type: str) -> str | None:
        """Why this process cannot use the collectives on its device, or None; called after the device was selected.

        Args:
            process_group: the chosen backend string.
            device_type: torch's device type.
        """
        import torch.distributed as dist

        library = device_backend(process_group, device_type)
        is_available = getattr(dist, "is_backend_available", None)  # torch >= 2.0
        if is_available is None or (library != "undefined" and is_available(library)):
            return None
        return f"no package has registered collectives for {device_type} with torch ({library})"

    def init(self, process_group: str, device_type: str, *, store: Store, rank: int, world_size: int,
             timeout: timedelta) -> None:  # fmt: skip
        """Make the default process group over ``store``.

        torch < 2.0 refuses composite strings such as ``"cpu:gloo,x:y"``. There the default group uses only the device's
        backend, and :class:`exp.distributed.Distributed` makes a second group with gloo for CPU tensors.
        """
        import torch.distributed as dist

        from exp.hardware.compat import supports_composite_groups

        if not supports_composite_groups():
            process_group = device_backend(process_group, device_type)
        dist.init_process_group(process_group, store=store, rank=rank, world_size=world_size, timeout=timeout)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor on this device over all ranks, in place, with the collectives that DDP uses for gradients."""
        import torch.distributed as dist

        dist.all_reduce(tensor)

    def destroy(self) -> None:
        """Destroy the default process group."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def ddp_class(self) -> type:
        """The DistributedDataParallel class: torch's own, unless the vendor has one."""
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel


def device_backend(process_group: str, device_type: str) -> str:
    """The backend of ``device_type`` in a composite string: ``("cpu:gloo,x:y", "x") -> "y"``."""
    if ":" not in process_group:
        return process_group
    parts = dict(part.split(":", 1) for part in process_group.split(","))
    return parts.get(device_type) or parts["cpu"]


class Backend(abc.ABC):
    """One hardware family. A class must set ``device_type`` and ``collectives`` and write the abstract methods.

    ``class MyBackend(Backend, options=("mode",))`` names the keys that ``options`` may have; without names, any may be.

    Args:
        name: name in the configuration, for messages and records (``"cpu"``).
        process_group: process group to use instead of that of :attr:`collectives`.
        env: environment variables of the workers, set before torch is imported. They override the backend's defaults;
            variables that the user has exported in the shell override them.
        options: settings that only this backend understands.
        allow_fallback: if the device's own collectives are missing, copy tensors through the CPU and use gloo.
        simulate: use simulated devices.

    Raises:
        ConfigError: there is no such option; or ``simulate`` is set, but the backend has no simulated devices.
    """

    device_type: str
    """torch's device type, such as ``"cpu"``."""

    collectives: Collectives
    """Process group of this device, such as ``Collectives("cpu:gloo,<device>:<library>")``."""

    capabilities: Capabilities = Capabilities()
    """What the cards can do; after :meth:`set_device`, what this rank's card can do."""

    visible_variables: tuple[str, ...] = ()
    """Environment variables with a list of the cards that a process may see; the first that is set counts."""

    _option_names: Sequence[str] | None = None

    def __init_subclass__(cls, options: Sequence[str] | None = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if options is not None:
            cls._option_names = options

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
        names = self._option_names
        unknown = [] if names is None else [str(option) for option in self.options if option not in names]
        if unknown:
            raise ConfigError(
                f"backend.options.{unknown[0]}: backend={name} has no such option",
                f"it has {', '.join(names or ['none'])}",
            )
        self.allow_fallback = allow_fallback
        self.simulate = simulate
        if simulate and not self.capabilities.simulation:
            raise ConfigError(f"backend.simulate=true: backend={name} has no simulated devices", "leave it out")

    def __str__(self) -> str:
        """Name for the terminal."""
        return self.name

    # -- Called by the parent: no torch, no device context; never raises -----------------------------------------------

    @abc.abstractmethod
    def unavailable_reason(self) -> str | None:
        """None if the backend is usable here; otherwise what was looked for, what was found, and how to get it."""

    @abc.abstractmethod
    def device_count(self) -> int:
        """Number of devices that this process may use; respects the visible-devices variables."""

    def worker_env(self, local_rank: int, local_world_size: int, single_node: bool) -> dict[str, str]:
        """Environment variables of one worker, set before torch is imported; exported variables of the user win.

        Args:
            local_rank: of the worker on its node.
            local_world_size: workers on this node.
            single_node: whether all workers are on this node, so that the loopback interface is enough.

        Returns:
            OMP_NUM_THREADS, this worker's share of the cores, and ``env`` of the config; subclasses add their defaults
            with lower priority.
        """
        return {"OMP_NUM_THREADS": str(max(1, usable_cores() // local_world_size)), **self.env}

    def run_env(self, precision: str, counts_fallbacks: bool) -> dict[str, str]:
        """Environment variables that a run needs before torch is imported; they override exported ones of the user.

        Args:
            precision: of the run.
            counts_fallbacks: whether the run will call :meth:`fallbacks`.

        Raises:
            ConfigError: an exported variable contradicts ``precision``.
        """
        return {}

    def packages(self) -> dict[str, str | None]:
        """Versions of the vendor's packages, libraries and driver by name, for reports; None: not installed."""
        return {}

    def monitor(self) -> list[dict[str, Any]]:
        """Readings of the vendor's monitor for every card of this host, visible or not; empty without a monitor.

        Returns:
            Per card ``index`` (on the host), ``name``, ``uuid``, ``bus_id``, ``utilization_percent``, ``memory_used``
            and ``memory_total`` (bytes), ``temperature_c``, ``power_w`` (watts), ``state``, ``serial``, ``processes``
            (ids of those that use the card); None for values that the monitor does not report.
        """
        return []

    # -- Called by a worker: torch is imported from here on -----------------------------------------------------------

    @property
    def torch_module(self) -> Any:
        """Torch's module for this device, ``torch.<device_type>``.

        ``device_count`` and ``set_device`` are required. Used if present are ``synchronize``, ``manual_seed_all``,
        ``get_rng_state``, ``set_rng_state``, ``memory_allocated``, ``max_memory_allocated``, ``mem_get_info``,
        ``get_device_properties``, ``Event`` and ``amp.GradScaler``.
        """
        import torch

        return getattr(torch, self.device_type, None)

    def set_device(self, local_rank: int) -> torch.device:
        """Select the device of this rank and return it; a vendor's plug-in is imported here.

        Raises:
            UnavailableError: ``local_rank`` is not below the number of devices that torch sees.
        """
        import torch

        module = self.torch_module
        count = module.device_count()
        if local_rank >= count:
            lists = [f"{name}={os.environ[name]}" for name in self.visible_variables if name in os.environ]
            raise UnavailableError(
                f"local_rank {local_rank} has no card: torch sees {count} of backend={self.name}"
                f"{' with ' * bool(lists)}{', '.join(lists)}",
                f"lower nproc, or correct "
                f"{self.visible_variables[0] if self.visible_variables else 'the visible devices'}",
            )
        module.set_device(local_rank)
        return torch.device(self.device_type, local_rank)

    def process_group(self) -> str:
        """Process-group backend for ``torch.distributed``, such as ``"cpu:gloo,<device>:<library>"``.

        The first that is set: ``backend.process_group`` of the configuration, the variable
        ``TORCH_DISTRIBUTED_BACKEND``, the default of :attr:`collectives`.
        """
        return self.requested_process_group or os.environ.get(PROCESS_GROUP_VARIABLE) or self.collectives.process_group

    def ddp_kwargs(self, device: torch.device) -> dict[str, Any]:
        """DDP arguments that name the model's card, if it has an index; without them some vendors' DDP takes all cards.

        Args:
            device: of :meth:`set_device`.
        """
        return {} if device.index is None else {"device_ids": [device.index], "output_device": device.index}

    def device_info(self, device: torch.device) -> dict[str, Any]:
        """Describe one device for the run record.

        Returns:
            ``name`` and ``index``, and if known ``memory`` (bytes). ``uuid``, ``serial``, ``bus_id`` or ``card`` (its
            number on the host) identify the card, as far as they are known; if none is, ``visible``, its entry in the
            visible-devices variable (:mod:`exp.hardware.cards`).
        """
        properties = call_if_present(self.torch_module, "get_device_properties", device.index)
        name = (
            getattr(properties, "name", None)
            or call_if_present(self.torch_module, "get_device_name", device.index)
            or device.type
        )
        info = {"name": str(name), "index": device.index}
        for key, attribute in (("memory", "total_memory"), ("uuid", "uuid")):
            value = getattr(properties, attribute, None)
            if value is not None:
                info[key] = value if isinstance(value, int) else str(value)
        return info

    def warnings(self) -> list[str]:
        """Warnings about the environment of this rank's device, one line each, such as variables without effect.

        Shown at the start of a run and by ``task=doctor``.
        """
        return []

    def usage(self) -> dict[str, Any]:
        """Memory and utilization of the current device; a training calls this every ``log_every`` steps.

        Returns:
            Values that the device reports within milliseconds: ``allocated`` and ``max_allocated`` (bytes of this
            process), ``free`` and ``total`` (bytes, with the use of other processes), ``utilization_percent``.
        """
        module = self.torch_module
        free, total = call_if_present(module, "mem_get_info") or (None, None)
        allocated, peak = call_if_present(module, "memory_allocated"), call_if_present(module, "max_memory_allocated")
        values = {"allocated": allocated, "max_allocated": peak, "free": free, "total": total}
        return {name: int(value) for name, value in values.items() if value is not None}

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        synchronize = getattr(self.torch_module, "synchronize", None)
        if synchronize is not None:
            synchronize()

    def end_step(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | None = None,
        outputs: Sequence[torch.Tensor] = (),
        **kwargs: Any,
    ) -> None:
        """Call ``optimizer.step``; lazy devices also end their graph here. Called once per optimizer step.

        With a loss scaler, ``optimizer.step`` is the scaler's, which may skip the update.

        Args:
            optimizer: the optimizer.
            model: the trained model; None: not known.
            outputs: tensors of this step that are read or accumulated later, such as its loss.
            **kwargs: of ``optimizer.step``.
        """
        optimizer.step(**kwargs)

    def end_batch(self, outputs: Any = None) -> None:
        """End one batch of an evaluation; lazy devices run their graph here.

        Args:
            outputs: outputs of the model: tensors, also nested in dicts, lists and tuples.
        """

    def close(self) -> None:
        """Run the vendor's exit handlers: a worker exits right after this, without the interpreter's clean-up."""

    def supports(self, precision: str) -> bool:
        """Whether this rank's device trains in ``precision`` (one of :data:`PRECISIONS`)."""
        return precision in self.capabilities.precisions

    def set_precision(self, precision: str) -> None:
        """Set float32 matrix products of this process to TF32 if ``precision`` is ``tf32``, else to full float32.

        Called before the first product. This method sets torch's general switch; a backend sets those of its family.

        Raises:
            ConfigError: an environment variable overrides the switch.
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
        """Operators that have run on the CPU instead of the device in this process so far.

        Returns:
            Number of calls and bytes (both directions) by ATen name; bytes are 0 if only calls are counted. None: the
            device does not count them.
        """
        return None


def call_if_present(module: Any, name: str, *arguments: Any) -> Any:
    """Call a function of a device's module; None: it has no such function, or the function fails.

    Arguments are positional, because vendors name them differently.
    """
    function = getattr(module, name, None)
    if function is None:
        return None
    try:
        return function(*arguments)
    except (AssertionError, AttributeError, NotImplementedError, RuntimeError, TypeError):
        return None


_CGROUPS = Path("/sys/fs/cgroup")
_PROCESS_CGROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Number of cores by the affinity mask and the CPU quota of this process's control group (cgroup), at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        for line in _PROCESS_CGROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "cpu" in controllers.split(","):
                cores = min(cores, _quota(_CGROUPS / controllers, path))
    return max(1, int(cores))


def _quota(root: Path, path: str) -> float:
    """The smallest CPU quota, in cores, of a control group and its parents.

    Args:
        root: mount point of the CPU controller.
        path: of the control group; inside a container it may be the host's path, which does not exist here.
    """
    least = float("inf")
    for part in (PurePosixPath(path), *PurePosixPath(path).parents):
        folder = root / str(part).lstrip("/.")
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if root == _CGROUPS:  # cgroup version 2, with a single tree
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text("ascii") for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0:
                least = min(least, int(quota) / int(period))
    return least
