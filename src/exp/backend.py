"""The backend interface: everything that differs between hardware families, on one page.

A hardware family is one subclass of :class:`Backend` in one file, plus one YAML file that names it by ``_target_``.
Backends outside this repository register a class through the entry-point group ``exp.backends`` or are named by
``_target_`` in a config of the user's own (docs/add-a-backend.md).

This module, and every backend module, must import without torch: the parent process composes and validates the
configuration with it, and never pays for torch or holds a device. Methods that are called in a worker import torch
inside. Members marked ``@plugin-dev`` are what a new backend has to write; the others have working defaults.
"""

from __future__ import annotations

import abc
import contextlib
import os
from typing import TYPE_CHECKING, Any, ContextManager, Mapping, Sequence

from exp.errors import ConfigError

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch.distributed import Store

__all__ = ["FLOAT32", "PRECISIONS", "Backend"]

PRECISIONS = ("fp32", "bf16", "fp16", "tf32")
FLOAT32 = ("fp32", "tf32")
"""Those that store all values as float32; ``tf32`` multiplies them with mantissas of 10 bits."""


class Backend(abc.ABC):
    """One hardware family. What is marked ``@plugin-dev`` has to be written; the rest has defaults. In groups:

    ===========  =====================================================================================================
    probing      :meth:`why_unavailable`, :meth:`device_count`, :meth:`worker_env`, :meth:`only`, :attr:`forks_safely`,
                 :meth:`prepare`
    identity     :meth:`packages`, :meth:`monitor`, :meth:`describe`
    device       :meth:`set_device`, random state, memory, :meth:`synchronize`, :meth:`end_step`, :meth:`end_batch`
    collectives  :attr:`default_process_group`, :meth:`collectives_missing`, groups, :attr:`ddp_class`
    precision    :attr:`precisions`, :meth:`supports`, :meth:`set_precision`, :meth:`autocast`, :meth:`grad_scaler`
    ===========  =====================================================================================================

    Args:
        name: what the user calls it, for messages and records (``"cpu"``).
        process_group: overrides :attr:`process_group`; ``None`` means the backend's own choice.
        env: environment variables for the workers, set before torch is imported. They win over the backend's own
            defaults, and lose to what the user has exported in the shell.
        options: settings that only this backend understands.
        allow_fallback: carry the device's tensors over gloo, by copies through the CPU, where its own collectives are
            missing (:meth:`collectives_missing`).
        simulate: use simulated devices.

    Raises:
        ConfigError: ``simulate`` for a backend that has none.
    """

    device_type: str
    """``@plugin-dev`` torch's device type, such as ``"cpu"``."""

    precisions: tuple[str, ...] = ("fp32",)
    """What this family can do at all; :meth:`supports` says what the device at hand can."""

    exclusive_devices: bool = True
    """Whether each rank needs a device of its own. False only where ranks share one (the CPU)."""

    gloo_carries_device: bool = False
    """Whether gloo takes tensors that lie on this device. Where it does not, they are staged through the CPU."""

    supports_sync_batchnorm: bool = False
    """Whether torch's SyncBatchNorm runs on this device."""

    has_simulator: bool = False
    """Whether there are simulated devices of this family."""

    visible_variables: tuple[str, ...] = ()
    """Environment variables that choose the cards which a process sees; the first that is set counts."""

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
        if simulate and not self.has_simulator:
            raise ConfigError(f"backend.simulate=true: there are no simulated devices of backend={name}; leave it out")
        self.name = name
        self.allow_fallback = allow_fallback
        self.simulate = simulate
        self.staged = False
        self.requested_process_group = process_group
        self.env = dict(env or {})
        self.options = dict(options or {})

    # -- Probing: by the parent. No torch, no device context; never raises ---------------------------------------------

    @abc.abstractmethod
    def why_unavailable(self) -> str | None:
        """``@plugin-dev`` None when usable here; else what was looked for, what was found and how to get it."""

    @abc.abstractmethod
    def device_count(self) -> int:
        """``@plugin-dev`` number of devices that this process may use (visible-device variables respected)."""

    def worker_env(self, local_rank: int, local_world_size: int, single_node: bool) -> dict[str, str]:
        """Environment of one worker, set before torch is imported; what the user has exported wins over it.

        Args:
            local_rank: of the worker on its node.
            local_world_size: workers on this node.
            single_node: whether the job stays on this node, so that nothing need leave the loopback interface.

        Returns:
            Here, ``env`` of the config; subclasses put their defaults before it.
        """
        return dict(self.env)

    def only(self, devices: Sequence[int], nproc: int) -> dict[str, str]:
        """Environment of a job that is to leave the other devices alone.

        Args:
            devices: their numbers among those that are visible here.
            nproc: workers of the job.
        """
        del nproc
        for variable in self.visible_variables:
            if variable in os.environ:
                visible = os.environ[variable].split(",")
                return {variable: ",".join(visible[device].strip() for device in devices)}
        return {variable: ",".join(map(str, devices)) for variable in self.visible_variables[:1]}

    @property
    def forks_safely(self) -> bool:
        """Whether workers may be forked from a process that has imported torch and MMEngine.

        True only where nothing that loads with them starts threads or opens a device.
        """
        return False

    def prepare(self) -> None:
        """Get ready what workers need and what takes long once, such as compiling; called before they start.

        Raises:
            UnavailableError: it cannot be got ready here.
        """

    # -- Identity: of the software, by the parent; of the cards --------------------------------------------------------

    def packages(self) -> dict[str, str | None]:
        """Versions of the vendor's packages, libraries and driver by name, for reports; None: not installed."""
        return {}

    def monitor(self) -> list[dict[str, Any]]:
        """What the vendor's monitor says of every card of this host, visible or not; empty where there is none.

        Returns:
            Per card ``index`` (on the host), ``name``, ``uuid``, ``bus_id``, ``utilisation_percent``, ``memory_used``
            and ``memory_total`` (bytes), ``temperature_c``, ``power_w``, ``state``; None for what it does not tell.
        """
        return []

    def describe(self, device: torch.device) -> dict[str, Any]:
        """``{"name", "index"}`` and what else is known of one device, for the run record.

        ``uuid``, ``serial``, ``bus_id`` or ``card`` (its number on the host, visible or not) tell cards apart, as far
        as they are known; where none is, ``visible``, its name in the visible-devices variable (:mod:`exp.cards`).
        """
        return {"name": device.type, "index": device.index}

    # -- Device: by a worker, as is all that follows; torch is imported from here on -----------------------------------

    @abc.abstractmethod
    def set_device(self, local_rank: int) -> torch.device:
        """``@plugin-dev`` Select the device of this rank and return it.

        Raises:
            UnavailableError: ``local_rank`` is not below the number of devices that torch sees.
        """

    def seed(self, seed: int) -> None:
        """Seed the device's random generator. CPU, Python and NumPy are seeded by the caller."""
        del seed

    def rng_state(self) -> torch.Tensor | None:
        """State of the device's random generator (uint8, on the CPU), or None where there is none of its own."""
        return None

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what :meth:`rng_state` gave."""
        del state

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""

    def memory(self) -> dict[str, int]:
        """``{"allocated", "max_allocated", "total"}`` in bytes where the device tells, else empty."""
        return {}

    def free_memory(self) -> tuple[int, int] | None:
        """Bytes free on the current device, other processes' use counted, and in total; None where it does not tell."""
        return None

    def end_step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        """Take the optimizer's step; lazy devices also end their graph here. Called once per step at any precision.

        With a loss scaler, ``optimizer.step`` is the scaler's, which may leave the update out.
        """
        optimizer.step(**kwargs)

    def end_batch(self) -> None:
        """End one batch of an evaluation; lazy devices run their graph here."""

    # -- Collectives ---------------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def default_process_group(self) -> str:
        """``@plugin-dev`` what torch >= 2.0 is given, CPU tensors included, such as ``"cpu:gloo,<device>:<lib>"``."""

    @property
    def process_group(self) -> str:
        """The process-group backend of this run: config, then ``TORCH_DISTRIBUTED_BACKEND``, then the default."""
        return self.requested_process_group or os.environ.get("TORCH_DISTRIBUTED_BACKEND") or self.default_process_group

    @property
    def process_group_source(self) -> str:
        """Where :attr:`process_group` comes from, for messages."""
        if self.requested_process_group:
            return "backend.process_group"
        return "TORCH_DISTRIBUTED_BACKEND" if os.environ.get("TORCH_DISTRIBUTED_BACKEND") else "the backend"

    def collectives_missing(self) -> str | None:
        """Why the device's own collectives cannot be used in this process, or None; asked after :meth:`set_device`."""
        return None

    def init_process_group(self, *, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        """Make the default process group over ``store``.

        Below torch 2.0 composite strings such as ``"cpu:gloo,x:y"`` are refused by torch: there the default group takes
        the device's part, and :class:`exp.engine.distributed.Distributed` makes a gloo group for CPU tensors beside it.
        """
        import torch.distributed as dist

        from exp.compat import device_part_of, supports_composite_process_groups

        name = self.process_group
        if not supports_composite_process_groups():
            name = device_part_of(name, self.device_type)
        dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=timeout)

    def init_staged_process_group(self, *, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        """Make a process group that carries this device's tensors over gloo, by copies through the CPU."""
        from exp.engine.staged import init_staged_process_group

        self.staged = True
        init_staged_process_group(self.device_type, store, rank, world_size, timeout)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up a tensor on this device over all ranks, in place, with the collectives that gradients use."""
        import torch.distributed as dist

        from exp.compat import supports_python_process_groups

        if self.staged and not supports_python_process_groups():
            host = tensor.cpu()
            dist.all_reduce(host)
            tensor.copy_(host)
        else:
            dist.all_reduce(tensor)

    def destroy_process_group(self) -> None:
        """Take the default process group down."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def ddp_kwargs(self, device: torch.device) -> dict[str, Any]:
        """The device arguments of the DDP wrapper; the only place that they come from."""
        return {"device_ids": [device.index], "output_device": device.index}

    @property
    def ddp_class(self) -> type:
        """The DistributedDataParallel class: torch's own, unless the vendor has one, or the group cannot be torch's."""
        from torch.nn.parallel import DistributedDataParallel

        from exp.compat import supports_python_process_groups

        if self.staged and not supports_python_process_groups():
            from exp.engine.staged import StagedDataParallel

            return StagedDataParallel
        return DistributedDataParallel

    # -- Precision -----------------------------------------------------------------------------------------------------

    def supports(self, precision: str) -> bool:
        """Whether this device trains in ``precision`` (one of :data:`PRECISIONS`)."""
        return precision in self.precisions

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
        """Context manager for the forward pass; does nothing for fp32 and tf32."""
        if precision in FLOAT32:
            return contextlib.nullcontext()
        import torch

        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        return torch.autocast(self.device_type, dtype=dtype)

    def grad_scaler(self, precision: str) -> Any | None:
        """A loss scaler with the interface of ``torch.amp.GradScaler``, or None where none is needed."""
        if precision != "fp16":
            return None
        import torch

        return torch.amp.GradScaler(self.device_type)
