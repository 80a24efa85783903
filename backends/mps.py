"""Metal on a Mac: one process, part of torch; torch.mps of 2.13, read and not run (docs/hardware/hardware.md)."""

from __future__ import annotations

import importlib.util
import platform
import sys
from typing import TYPE_CHECKING, Any

from exp.backends import _probe
from exp.backends.accelerator import AcceleratorBackend

from exp.errors import UnavailableError
from exp.hardware.backend import Capabilities, call_if_present

if TYPE_CHECKING:
    import torch

__all__ = ["MpsBackend"]

_ASK = "import torch; print('answer', int(torch.backends.mps.is_available()))"


class MpsBackend(AcceleratorBackend):
    """The GPU of a Mac with Apple's chip.

    It has no collectives, no float64 and no peak of memory. Its loss scaling fails (``GradScaler.unscale_``): there is
    no fp16. Operators that it lacks run on the CPU, with torch's warning (PYTORCH_ENABLE_MPS_FALLBACK).
    """

    device_type = own_type = "mps"
    capabilities = Capabilities(precisions=("fp32", "bf16"), reported_env=("PYTORCH_MPS_", "PYTORCH_ENABLE_MPS_"))

    def unavailable_reason(self) -> str | None:
        """What is missing: a Mac with Apple's chip, torch with Metal, or macOS 14; None: nothing."""
        if sys.platform != "darwin" or platform.machine() != "arm64":
            return f"Metal needs a Mac with Apple's chip; this is {sys.platform} on {platform.machine()}"
        if importlib.util.find_spec("torch") is None or not self.device_count():
            return f"torch {_probe.torch_build()['version']} finds no Metal device; update macOS (14) and torch (2.6)"
        return None

    def device_count(self) -> int:
        """1 on a Mac whose torch finds Metal: every process would use the same GPU."""
        return int(sys.platform == "darwin" and bool(_probe.ask_torch(_ASK, "0", ())[0]))

    def worker_env(self, local_rank: int, local_world_size: int, single_node: bool) -> dict[str, str]:
        """Let operators without a kernel run on the CPU; torch reads the variable when it is imported."""
        return {
            "PYTORCH_ENABLE_MPS_FALLBACK": "1",
            **super().worker_env(local_rank, local_world_size, single_node),
        }

    def set_device(self, local_rank: int) -> torch.device:
        """Return the one device.

        Raises:
            UnavailableError: ``local_rank`` is not 0.
        """
        import torch

        if local_rank:
            raise UnavailableError(f"local_rank {local_rank}: Metal has one device, for one process", "set nproc=1")
        return torch.device("mps", 0)

    def usage(self) -> dict[str, Any]:
        """Memory of this process's tensors, and of what Metal recommends at most."""
        values = {
            "allocated": call_if_present(self.torch_module, "current_allocated_memory"),
            "total": call_if_present(self.torch_module, "recommended_max_memory"),
        }
        return {name: int(value) for name, value in values.items() if value is not None}

    def device_info(self, device: torch.device) -> dict[str, Any]:
        """Name of the chip's family, and memory in bytes."""
        return {"name": f"Metal ({platform.machine()})", "index": 0, "memory": self.usage().get("total")}
