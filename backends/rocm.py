"""AMD cards: torch's ROCm build uses ``torch.cuda`` and the device type ``cuda``."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

from exp.backends import _monitor, _probe
from exp.backends.cuda import CudaBackend

__all__ = ["RocmBackend"]

_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
_TF32_SINCE = (2, 7)  # of torch
_REPORTED = (
    "ROCR_", "HIP_", "HIPBLASLT_", "HSA_", "MIOPEN_", "NCCL_", "CUDA_VISIBLE_DEVICES", "PYTORCH_HIP_ALLOC_CONF",
)  # fmt: skip


class RocmBackend(CudaBackend):
    """AMD cards; RCCL is registered under the name NCCL, and reads NCCL's environment variables."""

    visible_variables = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    _driver = Path("/sys/module/amdgpu/version")  # exists for AMD's packaged driver only
    hiding_variables = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    capabilities = replace(CudaBackend.capabilities, reported_env=_REPORTED)

    def unavailable_reason(self) -> str | None:
        """What is missing: a ROCm build of it, the driver, or a visible card; None: nothing."""
        build = _probe.torch_build()
        if not build["hip"]:
            other = "; use backend=cuda, or install" if build["cuda"] else "; install"
            return f"torch {build['version']} is built without ROCm{other} a ROCm build of torch"
        return self._why_no_card(
            f"no AMD card is known to the kernel driver (looked for cards in {_TOPOLOGY}); "
            "install the driver, or give the container /dev/kfd and /dev/dri"
        )

    def _total(self) -> int:
        """Number of nodes with SIMD units in the driver's topology; nodes of CPUs have none."""
        return sum(_has_simd_units(properties) for properties in _TOPOLOGY.glob("*/properties"))

    def _visible(self, total: int) -> int:
        """Number of visible cards; ROCR_VISIBLE_DEVICES applies first, the others to the cards that it leaves."""
        remaining = _probe.count_visible(total, "ROCR_VISIBLE_DEVICES")
        return _probe.count_visible(remaining, "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

    def worker_env(self, local_rank: int, local_world_size: int, single_node: bool) -> dict[str, str]:
        """Also a cache folder for MIOpen, one per card and host: processes that share a cache corrupt it.

        There is no cache if the card has no name of its own, or the user's cache folder cannot be written.
        """
        card, folder = self._host_card(local_rank), _cache_folder()
        defaults = {"MIOPEN_DISABLE_CACHE": "1"}
        if card is not None and folder is not None:
            cache = folder / "exp" / "miopen" / platform.node() / card
            defaults = {"MIOPEN_USER_DB_PATH": str(cache), "MIOPEN_CUSTOM_CACHE_DIR": str(cache)}
        return {**defaults, **super().worker_env(local_rank, local_world_size, single_node)}

    def supports(self, precision: str) -> bool:
        """Whether the card supports ``precision``: tf32 only gfx94x with torch >= 2.7, the others on every card."""
        if precision == "tf32":
            import torch

            from exp.hardware.compat import TORCH_VERSION

            properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
            return TORCH_VERSION >= _TF32_SINCE and str(getattr(properties, "gcnArchName", "")).startswith("gfx94")
        return precision in self.capabilities.precisions

    def set_precision(self, precision: str) -> None:
        """Also set hipBLASLt's variable, which TF32 needs here; hipBLASLt reads it at every product."""
        os.environ["HIPBLASLT_ALLOW_TF32"] = str(int(precision == "tf32"))
        super().set_precision(precision)

    def packages(self) -> dict[str, str | None]:
        """Versions of the HIP that torch was built for, and of the driver."""
        return {"hip": _probe.torch_build()["hip"], "driver": self.driver_version()}

    def monitor(self) -> list[dict[str, Any]]:
        """Readings of rocm-smi."""
        return _monitor.rocm_smi()

    def _card(self, index: int) -> int | None:
        """Number on this host of the card with torch's ``index``; None: unknown.

        ROCR_VISIBLE_DEVICES applies first; indices in the other variables count the cards that it leaves.
        """
        remaining = _probe.visible_card(index, "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        return None if remaining is None else _probe.visible_card(remaining, "ROCR_VISIBLE_DEVICES")

    def _host_card(self, index: int) -> str | None:
        """Name of a card that is unique on this host, also in Slurm jobs and containers, which renumber cards.

        None: there is no such name.
        """
        number = self._card(index)
        if number is None:
            return _probe.visible_name(index, "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        nodes = sorted(int(path.parent.name) for path in _TOPOLOGY.glob("*/properties") if _has_simd_units(path))
        return f"node{nodes[number]}" if number < len(nodes) else None


def _cache_folder() -> Path | None:
    """The user's cache folder, which may not exist yet; None: it cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/"), ".cache"))
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return folder if os.access(str(existing), os.W_OK) else None


def _has_simd_units(properties: Path) -> bool:
    try:
        lines = properties.read_text(encoding="utf-8").splitlines()
    except PermissionError:  # the driver refuses cards that were not given to this container
        return False
    return any(line.split()[0] == "simd_count" and line.split()[1] != "0" for line in lines if line.strip())
