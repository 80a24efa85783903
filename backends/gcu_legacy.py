"""The legacy generation of GCU (CloudBlazer T20 and T21): Python 3.8, torch 1.10, device type ``xla``."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Sequence

from exp.backends import _gcu_environment
from exp.backends.gcu import GcuBackend

from exp.errors import ConfigError
from exp.hardware.backend import Capabilities, Collectives, call_if_present

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch import nn
    from torch.distributed import Store

__all__ = ["LegacyGcuBackend"]

_CLEAN_UP = "_prepare_to_exit"  # private, but this generation gets no further releases
_EFP = "ENFLAME_ENABLE_EFP"
_STEPS = ("live", "model")
_BATCHES_PER_GRAPH = 32


class LegacyGcuBackend(GcuBackend, options=("step",)):  # type: ignore[call-arg]
    """Legacy cards: lazy graphs, the vendor's own collectives (``eccl`` only) and DDP.

    There is no ``bf16`` or ``fp16``: users report that mixed precision of this generation (``torch_gcu.amp``) crashes
    the driver. With precision ``efp`` the compiler rounds by itself, as in the vendor's own trainings.

    ``options.step`` of the configuration decides what is computed at the end of a step. ``live``: the graph of every
    live tensor. ``model``: parameters, optimizer state, buffers and losses alone, as in the vendor's own trainings, and
    in evaluation the outputs; other tensors that live beyond a step (of a hook, or an average of weights) then stay
    uncomputed, and keep their inputs alive.
    """

    device_type = "xla"
    count_script = "import torch, torch_gcu; print('answer', torch_gcu.device_count())"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        step = self.options.get("step", _STEPS[0])
        if step not in _STEPS:
            raise ConfigError(f"backend.options.step={step}: use one of {', '.join(_STEPS)}")
        self.collectives = LegacyCollectives()
        self._by_model = step == "model"
        self._batches = 0

    @property
    def capabilities(self) -> Capabilities:
        """Precisions ``fp32`` and ``efp``; workers are forked on simulated cards only."""
        return Capabilities(
            precisions=("fp32", "efp"),
            reported_env=_gcu_environment.REPORTED,
            forking=self.simulate,
            simulation=True,
        )

    def run_env(self, precision: str, counts_fallbacks: bool) -> dict[str, str]:
        """The compiler's variable for ``efp``, which it reads before the first graph.

        Raises:
            ConfigError: the exported variable contradicts ``precision``.
        """
        if _EFP in os.environ and _gcu_environment.is_on(_EFP) != (precision == "efp"):
            raise ConfigError(f"{_EFP}={os.environ[_EFP]} overrules precision={precision}", "unset it")
        environment = super().run_env(precision, counts_fallbacks=False)
        return {**environment, _EFP: "true"} if precision == "efp" else environment

    @property
    def torch_module(self) -> Any:
        """The plug-in itself: torch has no module for this device. It gives no access to the card's generator."""
        return self._plugin()

    def supports(self, precision: str) -> bool:
        """Whether ``precision`` is the one set in the environment (:meth:`run_env`), as the compiler cannot switch."""
        return precision == ("efp" if _gcu_environment.is_on(_EFP) else "fp32")

    def synchronize(self) -> None:
        """Run the lazy graph, and wait for the device."""
        import torch_gcu

        torch_gcu.sync_lived_tensor()  # only starts the graph
        torch_gcu.synchronize()

    def usage(self) -> dict[str, Any]:
        """Bytes that this process holds on the current card; the plug-in of this generation reports nothing else."""
        allocated = call_if_present(self.torch_module, "get_hbm_alloc_size")
        return {} if allocated is None else {"allocated": int(allocated)}

    def fallbacks(self) -> Mapping[str, tuple[int, int]] | None:
        """Operators that ran on the CPU; for simulated cards only."""
        return super().fallbacks() if self.simulate else None

    def end_step(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | None = None,
        outputs: Sequence[torch.Tensor] = (),
        **kwargs: Any,
    ) -> None:
        """Call the optimizer and run the graph, which would otherwise grow without bound."""
        import torch_gcu

        arguments: dict[str, Any] = {"optimizer_args": kwargs}
        if self._by_model and model is not None:
            arguments.update(model=model, extra_output=list(_on_card(outputs)))
        torch_gcu.optimizer_step(optimizer, **arguments)

    def end_batch(self, outputs: Any = None) -> None:
        """Run the graph of this batch: that of a whole evaluation would not fit into memory.

        With ``options.step=model``, run only the graph of the outputs, and every 32 batches all live tensors, among
        them the sums of metrics.
        """
        import torch_gcu

        self._batches += 1
        tensors = list(_on_card(outputs)) if self._by_model else []
        if tensors and self._batches % _BATCHES_PER_GRAPH:
            torch_gcu.unlazy(tensors)
        else:
            torch_gcu.sync_lived_tensor()

    def close(self) -> None:
        """Run the exit handler of the vendor's package, since a worker exits without running :mod:`atexit` handlers.

        It is called by name: ``atexit`` has no public way to run the handlers of one package, and those of others
        (executors, loaders) wait for threads. It is unregistered first, so that it does not run twice.
        """
        plugin: Any = sys.modules.get("torch_gcu")
        clean_up = getattr(plugin, _CLEAN_UP, None)
        if clean_up is not None:
            atexit.unregister(clean_up)
            clean_up()

    def device_info(self, device: torch.device) -> dict[str, Any]:
        """Name, index and identity of the card."""
        name = {} if hasattr(self.torch_module, "get_device_name") else {"name": "GCU (legacy)"}
        return {**super().device_info(device), **name}


class LegacyCollectives(Collectives):
    """The vendor's own collectives, which are not part of torch.distributed; CPU tensors use a separate gloo group."""

    def __init__(self) -> None:
        super().__init__("eccl")
        self._store: Store | None = None

    def missing(self, process_group: str, device_type: str) -> str | None:
        """Why the vendor's collectives cannot be used, or None; without ECCL they can be imported, but not used."""
        try:
            vendor = importlib.import_module("torch_gcu.distributed")
        except (ImportError, OSError) as error:
            return f"torch_gcu.distributed does not import ({error})"
        if hasattr(vendor, "is_eccl_available") and not vendor.is_eccl_available():
            return "torch_gcu.distributed has no ECCL (a component of its own of the TopsRider package: -C tops-eccl)"
        return None

    def init(
        self, process_group: str, device_type: str, *, store: Store, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        """Make the vendor's process group, with rendezvous over ``env://``.

        Rank 0 opens a new TCP store at a free port, so that no other program can take the port in between, and passes
        the port on through ``store``. The variables are those by which torch's agent declares that it serves a store.
        The address is MASTER_ADDR, or the loopback interface if it is not set. The group has its own timeout
        (ECCL_TIMEOUT).

        Raises:
            ConfigError: ``process_group`` is not ``eccl``.
        """
        if process_group != "eccl":
            raise ConfigError(
                f"process group '{process_group}' is not one that torch_gcu of this generation makes",
                "leave out backend.process_group for eccl, or set it to gloo for copies through the CPU",
            )
        import torch_gcu.distributed as vendor
        from torch.distributed import TCPStore

        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if rank == 0:
            self._store = TCPStore(os.environ["MASTER_ADDR"], 0, world_size, True, timeout, wait_for_workers=False)
            store.set("gcu_port", str(self._store.port))
        os.environ["MASTER_PORT"] = store.get("gcu_port").decode()
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        # The vendor prefixes its keys with this count, which differs between nodes after a restart; the store is new.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
        vendor.init_process_group("eccl", rank=rank, world_size=world_size)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        import torch_gcu.distributed as vendor

        vendor.all_reduce(tensor)

    def destroy(self) -> None:
        """Destroy the vendor's group, then torch's gloo group."""
        import torch_gcu.distributed as vendor

        vendor.destroy_process_group()
        super().destroy()
        self._store = None

    @property
    def ddp_class(self) -> type:
        """The vendor's DistributedDataParallel."""
        from torch_gcu.nn.parallel import DistributedDataParallel

        return DistributedDataParallel


def _on_card(values: Any) -> Iterator[torch.Tensor]:
    """The tensors on cards in ``values``, also in nested dicts, lists and tuples."""
    device = getattr(values, "device", None)
    if device is not None:
        if device.type == LegacyGcuBackend.device_type:
            yield values
    elif isinstance(values, (dict, list, tuple)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _on_card(value)
