"""The CPU: no card at all, for development, tests and dry runs."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from exp.hardware.backend import Backend
from exp.hardware.cores import usable_cores

if TYPE_CHECKING:
    import torch

__all__ = ["CpuBackend"]

_MEMINFO = Path("/proc/meminfo")


class CpuBackend(Backend):
    """Processes on the CPU; ranks share it, so their number is not limited by the number of cores."""

    device_type = "cpu"
    forks_safely = True
    exclusive_devices = False
    precisions = ("fp32", "bf16")
    default_process_group = "gloo"
    gloo_carries_device = True
    reduces_means = True
    loads_plugins = False
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

    def why_unavailable(self) -> None:
        """Return None: there is always a CPU."""

    def device_count(self) -> int:
        """Cores that this process may use."""
        return usable_cores()

    def only(self, devices: Sequence[int], nproc: int) -> dict[str, str]:
        """As many threads per worker as there are cores for it, unless the user has said how many."""
        return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, len(devices) // nproc))}

    def worker_env(self, local_rank: int, local_world_size: int, single_node: bool) -> dict[str, str]:
        """MKL's own variable wins over OpenMP's inside MKL: it has to follow what OpenMP will really be told."""
        environment = super().worker_env(local_rank, local_world_size, single_node)
        threads = os.environ.get("OMP_NUM_THREADS", environment["OMP_NUM_THREADS"])
        return {"MKL_NUM_THREADS": threads, **environment}

    def set_device(self, local_rank: int) -> torch.device:
        """Return the CPU; also applies the number of threads, in case torch was imported before it was set."""
        import torch

        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and int(threads) > 0 and torch.get_num_threads() != int(threads):
            torch.set_num_threads(int(threads))
        return torch.device("cpu")

    def free_memory(self) -> tuple[int, int] | None:
        """What the kernel reckons to be available without swapping."""
        sizes = {}
        if _MEMINFO.is_file():
            for line in _MEMINFO.read_text(encoding="ascii").splitlines():
                name, _, size = line.partition(":")
                sizes[name] = int(size.split()[0]) * 1024
        if "MemAvailable" not in sizes:
            return None
        return sizes["MemAvailable"], sizes["MemTotal"]

    def fused_attention(self, precision: str) -> bool:
        """In every precision."""
        return True

    def ddp_kwargs(self, device: torch.device) -> dict[str, Any]:
        """No device arguments: DDP refuses them for CPU modules."""
        return {}

    def describe(self, device: torch.device) -> dict[str, Any]:
        """The processor's name and its usable cores."""
        return {"name": _processor_name(), "index": None, "cores": self.device_count()}


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
