"""The legacy generation of GCU (CloudBlazer T20 and T21): Python 3.8, torch 1.10, device type ``xla``."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from exp.backends.gcu import GcuBackend, place_of

from exp.errors import ConfigError

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch.distributed import Store

__all__ = ["LegacyGcuBackend"]


class LegacyGcuBackend(GcuBackend):
    """Legacy cards: lazy graphs, the vendor's own collectives (``eccl`` only) and DDP.

    fp32 only: mixed precision of this generation (``torch_gcu.amp``) crashed the driver for its users.
    """

    device_type = "xla"
    precisions = ("fp32",)
    default_process_group = "eccl"

    def set_device(self, local_rank: int) -> torch.device:
        """Select the card through the plug-in itself; torch has no module for it."""
        import torch

        plugin = self._plugin()
        self._check_rank(local_rank, plugin.device_count())
        plugin.set_device(local_rank)
        return torch.device(self.device_type, local_rank)

    def init_process_group(self, *, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        """Make the vendor's group.

        It meets over ``env://``, so rank 0 announces a free port through ``store``. The address is the one that torch's
        agent has set, and the loopback interface's where there is none. Its timeout is its own (ECCL_TIMEOUT).

        Raises:
            ConfigError: a group other than eccl was asked for.
        """
        if self.process_group != "eccl":
            raise ConfigError(
                f"process group '{self.process_group}' is not one that torch_gcu of this generation makes; leave out "
                "backend.process_group for eccl, or set it to gloo for copies through the CPU"
            )
        import torch_gcu.distributed as vendor

        if rank == 0:
            store.set("gcu_port", str(_free_port()))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ["MASTER_PORT"] = store.get("gcu_port").decode()
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
        # Else torch would take rank 0, too, for a client of a store that its own agent keeps elsewhere.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        vendor.init_process_group("eccl", rank=rank, world_size=world_size)

    def collectives_missing(self) -> str | None:
        """Whether the vendor's collectives can be imported."""
        try:
            importlib.import_module("torch_gcu.distributed")
        except (ImportError, OSError) as error:
            return f"torch_gcu.distributed does not import ({error})"
        return None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """With the vendor's collectives, which torch.distributed does not know."""
        if self.staged:
            super().all_reduce(tensor)
            return
        import torch_gcu.distributed as vendor

        vendor.all_reduce(tensor)

    def destroy_process_group(self) -> None:
        """Take down the vendor's group, then torch's gloo group beside it."""
        if not self.staged:
            import torch_gcu.distributed as vendor

            vendor.destroy_process_group()
        super().destroy_process_group()

    @property
    def ddp_class(self) -> type:
        """The vendor's own."""
        if self.staged:
            return super().ddp_class
        from torch_gcu.nn.parallel import DistributedDataParallel

        return DistributedDataParallel

    def ddp_kwargs(self, device: torch.device) -> dict[str, Any]:
        """One card, always named: the vendor's DDP takes None for ALL cards."""
        return {"device_ids": [device.index], "output_device": device.index}

    def supports(self, precision: str) -> bool:
        """fp32."""
        return precision in self.precisions

    def grad_scaler(self, precision: str) -> None:
        """None: there is no half precision to scale for."""

    def seed(self, seed: int) -> None:
        """Seed every card; torch.manual_seed reaches none of them, and the plug-in takes 32 bits."""
        import torch_gcu

        torch_gcu.manual_seed_all(seed % 2**32)

    def rng_state(self) -> None:
        """None: the card's generator is not public."""

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Nothing to restore."""

    def synchronize(self) -> None:
        """Run what the lazy graph holds, and wait."""
        import torch_gcu

        torch_gcu.sync_lived_tensor()  # starts it, no more
        torch_gcu.synchronize()

    def memory(self) -> dict[str, int]:
        """Not public on this generation."""
        return {}

    def free_memory(self) -> None:
        """Not public on this generation; efsmi knows."""

    def end_step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        """Step and run the graph: a step that does not end lets it grow without bound.

        Without its ``model`` argument, the vendor's function runs the graph of every tensor that is alive, the running
        means of the losses included. Arguments of ``optimizer.step`` go in by ``optimizer_args``.
        """
        import torch_gcu

        torch_gcu.optimizer_step(optimizer, optimizer_args=kwargs)

    def end_batch(self) -> None:
        """Run the graph of this batch: that of a whole evaluation would not fit."""
        import torch_gcu

        torch_gcu.sync_lived_tensor()

    def describe(self, device: torch.device) -> dict[str, Any]:
        """Index, and the card's number on the host; efsmi knows more."""
        return {"name": "GCU (legacy)", "index": device.index, **place_of(device.index)}


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
