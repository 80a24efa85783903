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
import os
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from exp.errors import ConfigError
from exp.hardware.collectives import Collectives
from exp.hardware.cores import usable_cores
from exp.hardware.numerics import FLOAT32, PRECISIONS, Numerics

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["FLOAT32", "PRECISIONS", "Backend"]


class Backend(Collectives, Numerics):
    """One hardware family. What is marked ``@plugin-dev`` has to be written; the rest has defaults. In groups:

    - probing: :meth:`why_unavailable`, :meth:`device_count`, :meth:`worker_env`, :meth:`precision_env`, :meth:`only`,
      :attr:`forks_safely`, :attr:`loads_plugins`, :meth:`prepare`
    - identity: :attr:`title`, :meth:`packages`, :meth:`monitor`, :meth:`describe`
    - device: :meth:`set_device`, :meth:`cautions`, random state, memory, :meth:`synchronize`, :meth:`end_step`,
      :meth:`end_batch`, :meth:`close`
    - collectives: :attr:`default_process_group`, :meth:`collectives_missing`, groups, :attr:`ddp_class`: all of
      :class:`exp.hardware.collectives.Collectives`
    - operators: :meth:`lacking_operators`, :meth:`fused_attention`, :meth:`why_not_compiled`, :meth:`fallbacks`,
      :meth:`counting_env`
    - precision: :attr:`precisions`, :meth:`supports`, :meth:`set_precision`, :meth:`autocast`, :meth:`grad_scaler`:
      this and the group before are :class:`exp.hardware.numerics.Numerics`

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

    exclusive_devices: bool = True
    """Whether each rank needs a device of its own. False only where ranks share one (the CPU)."""

    pins_memory: bool = False
    """Whether host memory can be page-locked, so that copies from it and to it go on by themselves, over a stream of
    their own where ``torch.<device_type>`` has streams."""

    gloo_carries_device: bool = False
    """Whether gloo takes tensors that lie on this device. Where it does not, they are staged through the CPU."""

    supports_sync_batchnorm: bool = False
    """Whether torch's SyncBatchNorm runs on this device."""

    has_simulator: bool = False
    """Whether there are simulated devices of this family."""

    visible_variables: tuple[str, ...] = ()
    """Environment variables that choose the cards which a process sees; the first that is set counts."""

    loads_plugins: bool = True
    """Whether torch (>= 2.5) may load all devices' plug-ins that it finds when it is imported. False where
    :meth:`set_device` imports what is needed: a plug-in whose runtime is missing would break ``import torch``."""

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
            Here, this worker's share of the cores, and ``env`` of the config; subclasses put their defaults before it.
        """
        defaults = {"OMP_NUM_THREADS": str(max(1, usable_cores() // local_world_size))}
        if not self.loads_plugins:
            defaults["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        return {**defaults, **self.env}

    def precision_env(self, precision: str) -> dict[str, str]:
        """What ``precision`` needs in a worker's environment before torch is imported; the user's exports win."""
        del precision
        return {}

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

    @property
    def title(self) -> str:
        """What the terminal calls it: its name, and what a user should know of a choice that was left to it."""
        return self.name

    def packages(self) -> dict[str, str | None]:
        """Versions of the vendor's packages, libraries and driver by name, for reports; None: not installed."""
        return {}

    def monitor(self) -> list[dict[str, Any]]:
        """What the vendor's monitor says of every card of this host, visible or not; empty where there is none.

        Returns:
            Per card ``index`` (on the host), ``name``, ``uuid``, ``bus_id``, ``utilisation_percent``, ``memory_used``
            and ``memory_total`` (bytes), ``temperature_c``, ``power_w``, ``state``, ``serial``; None for what it does
            not tell.
        """
        return []

    def describe(self, device: torch.device) -> dict[str, Any]:
        """``{"name", "index"}`` and what else is known of one device, for the run record.

        ``uuid``, ``serial``, ``bus_id`` or ``card`` (its number on the host, visible or not) tell cards apart, as far
        as they are known; where none is, ``visible``, its name in the visible-devices variable
        (:mod:`exp.hardware.cards`).
        """
        return {"name": device.type, "index": device.index}

    # -- Device: by a worker, as is all that follows; torch is imported from here on -----------------------------------

    @abc.abstractmethod
    def set_device(self, local_rank: int) -> torch.device:
        """``@plugin-dev`` Select the device of this rank and return it.

        Raises:
            UnavailableError: ``local_rank`` is not below the number of devices that torch sees.
        """

    def cautions(self) -> list[str]:
        """Of the environment, what does not do what the user may expect on this rank's device, a line each.

        Told at the start of a run and by the doctor, after :meth:`set_device`.
        """
        return []

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

    def mark(self) -> Callable[[], object]:
        """What waits, on any thread, until the device has done what it was given so far. Here it is waited for now."""
        self.synchronize()
        return lambda: None

    def memory(self) -> dict[str, int]:
        """``{"allocated", "max_allocated", "total"}`` in bytes where the device tells, else empty."""
        return {}

    def utilisation(self) -> float | None:
        """Percent of the last moments in which the current device was at work; asked in a training every ``log_every``
        steps, so None, too, where the answer takes more than milliseconds.
        """
        return None

    def free_memory(self) -> tuple[int, int] | None:
        """Bytes free on the current device, other processes' use counted, and in total; None where it does not tell."""
        return None

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
        del model, outputs
        optimizer.step(**kwargs)

    def end_batch(self, outputs: Any = None) -> None:
        """End one batch of an evaluation; lazy devices run their graph here.

        Args:
            outputs: of the model, in whatever structure; what is computed of them is small.
        """

    def close(self) -> None:
        """What the vendor does when the interpreter ends; a worker ends right after this, without the interpreter's."""
