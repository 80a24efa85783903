"""The CPU, for development, tests and dry runs."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.backends._probe import AUTOLOAD, NO_CUDA

from exp.hardware.backend import PRECISIONS, Backend, Capabilities, Collectives, usable_cores

if TYPE_CHECKING:
    import torch

__all__ = ["CpuBackend"]

_MEMINFO = Path("/proc/meminfo")
_CPUINFO = Path("/proc/cpuinfo")


class CpuBackend(Backend, options=()):
    """Processes on the CPU; ranks share it, so their number is not limited by the number of cores."""

    device_type = "cpu"
    collectives = Collectives("gloo", averages=True, gloo=True)
    capabilities = Capabilities(
        precisions=("fp32", "bf16"),
        fused_attention=PRECISIONS,
        shared_device=True,
        reported_env=("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"),
        forking=True,
    )

    def unavailable_reason(self) -> None:
        """Return None: there is always a CPU."""

    def device_count(self) -> int:
        """Number of cores that this process may use."""
        return usable_cores()

    def worker_env(self, local_rank: int, local_world_size: int, single_node: bool) -> dict[str, str]:
        """Also MKL_NUM_THREADS, which overrides OMP_NUM_THREADS inside MKL, so it must have the value used there."""
        environment = super().worker_env(local_rank, local_world_size, single_node)
        threads = os.environ.get("OMP_NUM_THREADS", environment["OMP_NUM_THREADS"])
        return {AUTOLOAD: "0", "MKL_NUM_THREADS": threads, **environment}

    def run_env(self, precision: str, counts_fallbacks: bool) -> dict[str, str]:
        """Hides CUDA's cards."""
        return NO_CUDA

    def set_device(self, local_rank: int) -> torch.device:
        """Return the CPU device. Also apply OMP_NUM_THREADS, in case torch was imported before it was set."""
        import torch

        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and int(threads) > 0 and torch.get_num_threads() != int(threads):
            torch.set_num_threads(int(threads))
        return torch.device("cpu")

    def usage(self) -> dict[str, Any]:
        """Memory of the host in bytes: ``free`` is what the kernel estimates as available without swapping."""
        if not _MEMINFO.is_file():
            return {}
        lines = (line.partition(":") for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        sizes = {name: int(size.split()[0]) * 1024 for name, _, size in lines}
        return {"free": sizes["MemAvailable"], "total": sizes["MemTotal"]} if "MemAvailable" in sizes else {}

    def device_info(self, device: torch.device) -> dict[str, Any]:
        """Name of the processor, and number of usable cores."""
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace") if _CPUINFO.is_file() else ""
        models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
        name = models[0] if models else platform.processor() or platform.machine()
        return {"name": name, "index": None, "cores": self.device_count()}
