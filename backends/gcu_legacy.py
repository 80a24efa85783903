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
from exp.hardware.backend import Capabilities, Collectives, ask

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch import nn
    from torch.distributed import Store

__all__ = ["LegacyGcuBackend"]

_CLEAN_UP = "_prepare_to_exit"  # private, and fixed: the last release of this generation is out
_EFP = "ENFLAME_ENABLE_EFP"
_STEPS = ("live", "model")
_BATCHES_PER_GRAPH = 32


class LegacyGcuBackend(GcuBackend):
    """Legacy cards: lazy graphs, the vendor's own collectives (``eccl`` only) and DDP.

    No ``bf16`` and ``fp16``: mixed precision of this generation (``torch_gcu.amp``) crashed the driver for its users.
    The vendor's own trainings let the compiler round, by an environment variable: ``efp``.

    ``options.step`` of the configuration: ``live`` ends a step with the graph of every live tensor; ``model`` with
    parameters, optimizer state, buffers and losses alone, as the vendor's own trainings do, and evaluates with the
    graph of the outputs. Tensors that live beyond a step and are not among these (of a hook, an average of weights)
    then wait, and keep what they need.
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
        """Two ways of float32; only simulated cards let workers fork."""
        return Capabilities(precisions=("fp32", "efp"), forking=self.simulate, simulation=True)

    def run_env(self, precision: str, counts_fallbacks: bool) -> dict[str, str]:
        """What the compiler is told, which has it in force before the first graph.

        Raises:
            ConfigError: what the user has exported says the opposite.
        """
        if _EFP in os.environ and _gcu_environment.is_on(_EFP) != (precision == "efp"):
            raise ConfigError(f"{_EFP}={os.environ[_EFP]} overrules precision={precision}; unset it")
        return {_EFP: "true"} if precision == "efp" else {}

    @property
    def module(self) -> Any:
        """The plug-in itself; torch has no module for it, and the card's generator is not public."""
        return self._plugin()

    def supports(self, precision: str) -> bool:
        """The one that the environment has chosen (:meth:`run_env`): the compiler does not change over."""
        return precision == ("efp" if _gcu_environment.is_on(_EFP) else "fp32")

    def synchronize(self) -> None:
        """Run what the lazy graph holds, and wait."""
        import torch_gcu

        torch_gcu.sync_lived_tensor()  # starts it, no more
        torch_gcu.synchronize()

    def usage(self) -> dict[str, Any]:
        """What this process holds on the current card; the rest is not public on this generation, but efsmi knows."""
        held = ask(self.module, "get_hbm_alloc_size")
        return {} if held is None else {"allocated": int(held)}

    def fallbacks(self) -> Mapping[str, tuple[int, int]] | None:
        """Of simulated cards alone."""
        return super().fallbacks() if self.simulate else None

    def end_step(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | None = None,
        outputs: Sequence[torch.Tensor] = (),
        **kwargs: Any,
    ) -> None:
        """Step and run the graph: a step that does not end lets it grow without bound."""
        import torch_gcu

        arguments: dict[str, Any] = {"optimizer_args": kwargs}
        if self._by_model and model is not None:
            arguments.update(model=model, extra_output=list(_on_card(outputs)))
        torch_gcu.optimizer_step(optimizer, **arguments)

    def end_batch(self, outputs: Any = None) -> None:
        """Run the graph of this batch: that of a whole evaluation would not fit.

        With ``options.step=model`` that of the outputs; what metrics add up of them is run now and then.
        """
        import torch_gcu

        self._batches += 1
        tensors = list(_on_card(outputs)) if self._by_model else []
        if tensors and self._batches % _BATCHES_PER_GRAPH:
            torch_gcu.unlazy(tensors)
        else:
            torch_gcu.sync_lived_tensor()

    def close(self) -> None:
        """Do what the vendor's package has registered with :mod:`atexit`, which a worker's end leaves out.

        By the name of its function: ``atexit`` has no public way to run what one package has registered, and what
        others have (executors, loaders) waits for threads. It is taken off the list, lest it run twice.
        """
        plugin: Any = sys.modules.get("torch_gcu")
        clean_up = getattr(plugin, _CLEAN_UP, None)
        if clean_up is not None:
            atexit.unregister(clean_up)
            clean_up()

    def describe(self, device: torch.device) -> dict[str, Any]:
        """Name and index, and what tells the card from the others of its host; efsmi knows more."""
        known = {} if hasattr(self.module, "get_device_name") else {"name": "GCU (legacy)"}
        return {**super().describe(device), **known}


class LegacyCollectives(Collectives):
    """The vendor's own, which torch.distributed does not know; its gloo group beside them carries CPU tensors."""

    def __init__(self) -> None:
        super().__init__("eccl")
        self._store: Store | None = None

    def missing(self, process_group: str, device_type: str) -> str | None:
        """Whether the vendor's collectives can be imported, and have ECCL: without it they import, with a warning."""
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
        """Make the vendor's group.

        It meets over ``env://``, at a store which rank 0 serves from the moment that its port is chosen: a port that is
        looked up first and taken later may be somebody else's by then. The variables are those by which torch's agent
        says that it serves one. The address is the one that the agent has set, and the loopback interface's where there
        is none. The group's timeout is its own (ECCL_TIMEOUT).

        Raises:
            ConfigError: a group other than eccl was asked for.
        """
        if process_group != "eccl":
            raise ConfigError(
                f"process group '{process_group}' is not one that torch_gcu of this generation makes; leave out "
                "backend.process_group for eccl, or set it to gloo for copies through the CPU"
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
        # A prefix of the vendor's keys, which differs between nodes after a restart; the store is a new one anyway.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
        vendor.init_process_group("eccl", rank=rank, world_size=world_size)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all ranks, in place."""
        import torch_gcu.distributed as vendor

        vendor.all_reduce(tensor)

    def destroy(self) -> None:
        """Take down the vendor's group, then torch's gloo group beside it."""
        import torch_gcu.distributed as vendor

        vendor.destroy_process_group()
        super().destroy()
        self._store = None

    @property
    def ddp_class(self) -> type:
        """The vendor's own."""
        from torch_gcu.nn.parallel import DistributedDataParallel

        return DistributedDataParallel


def _on_card(values: Any) -> Iterator[torch.Tensor]:
    """The tensors on cards in dicts, lists and tuples."""
    device = getattr(values, "device", None)
    if device is not None:
        if device.type == LegacyGcuBackend.device_type:
            yield values
    elif isinstance(values, (dict, list, tuple)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _on_card(value)
