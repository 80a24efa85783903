"""NVIDIA cards."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.backends import _monitor, _probe
from exp.backends._probe import AUTOLOAD

from exp.errors import ConfigError
from exp.hardware.backend import FLOAT32, PRECISIONS, Backend, Capabilities, Collectives

if TYPE_CHECKING:
    import torch

__all__ = ["CudaBackend"]

_NVML = ("libnvidia-ml.so.1", ("nvmlInit_v2",), "nvmlDeviceGetCount_v2")
_PROC = Path("/proc/driver/nvidia/gpus")
_UPSTREAM = re.compile(r"[^+]*(\+(cpu|cu\d+|rocm[\d.]+))?")  # versions of PyTorch's own builds
_AMPERE = 8  # compute capability: the first with bf16 and TF32


class CudaBackend(Backend, options=()):
    """NVIDIA cards through ``torch.cuda``, with NCCL for tensors on cards and gloo for CPU tensors."""

    device_type = "cuda"
    collectives = Collectives("cpu:gloo,cuda:nccl", averages=True, gloo=True)
    capabilities = Capabilities(
        precisions=("fp32", "bf16", "fp16", "tf32"),
        fused_attention=PRECISIONS,
        sync_batchnorm=True,
        pinned_memory=True,
        reported_env=("CUDA_", "NCCL_", "NVIDIA_TF32_OVERRIDE", "PYTORCH_CUDA_ALLOC_CONF"),
    )
    visible_variables = ("CUDA_VISIBLE_DEVICES",)
    hiding_variables: tuple[str, ...] = visible_variables
    """All variables that hide cards from torch."""
    _driver = Path("/sys/module/nvidia/version")

    def unavailable_reason(self) -> str | None:
        """What is missing: a CUDA build of it, the driver, or a visible card; None: nothing."""
        build = _probe.torch_build()
        if build["hip"]:
            return f"torch {build['version']} is built for ROCm; use backend=rocm"
        if not build["cuda"]:
            return f"torch {build['version']} is built without CUDA; install a CUDA build of torch"
        return self._why_no_card(
            f"no NVIDIA driver answers (looked for libnvidia-ml.so.1 and {_PROC}); "
            "install the driver, or give the container access to the cards"
        )

    def _why_no_card(self, without_driver: str) -> str | None:
        """None if there is a visible card; otherwise the reason: ``without_driver`` if the host has no card at all."""
        if self.device_count():
            return None
        if self._total():
            return f"{' or '.join(self.hiding_variables)} hides every card; unset it"
        if self._is_upstream():
            return without_driver
        problem = self._counted_by_torch()[1]
        return (
            f"torch {_probe.torch_build()['version']} counts no card{f' ({problem})' if problem else ''}; check the "
            f"vendor's driver, LD_LIBRARY_PATH, and {' and '.join(self.hiding_variables)}"
        )

    def _total(self) -> int:
        """Number of cards of the host, visible or not, by NVML or /proc, without torch."""
        return _probe.cards_by_library(*_NVML) or (len(list(_PROC.iterdir())) if _PROC.is_dir() else 0)

    def _visible(self, total: int) -> int:
        """Number of visible cards out of ``total``, by the visible-devices variables."""
        return _probe.count_visible(total, *self.hiding_variables)

    @staticmethod
    def _is_upstream() -> bool:
        return bool(_UPSTREAM.fullmatch(_probe.torch_build()["version"] or ""))

    def _counted_by_torch(self) -> tuple[int, str | None]:
        """Number of visible cards by torch, and why there is no answer; (0, None) for PyTorch's own builds.

        Cards of other vendors (MetaX, Iluvatar; Hygon under ROCm) use this device type, through a build of torch of
        their own, and have neither NVML nor the folder in /proc. Only such builds are asked: it takes seconds.
        """
        if self._is_upstream():
            return 0, None
        visible = tuple(os.environ.get(name) for name in self.hiding_variables)
        count, problem = _probe.ask_torch("import torch; print('answer', torch.cuda.device_count())", "0", visible)
        return count or 0, problem

    def device_count(self) -> int:
        """Number of visible cards, without torch if possible, otherwise as torch counts them."""
        total = self._total()
        return self._visible(total) if total else self._counted_by_torch()[0]

    def worker_env(self, local_rank: int, local_world_size: int, single_node: bool) -> dict[str, str]:
        """On a single node also NCCL_SOCKET_IFNAME=lo, so that NCCL's bootstrap stays on the loopback interface."""
        defaults = {"NCCL_SOCKET_IFNAME": "lo"} if single_node else {}
        return {AUTOLOAD: "0", **defaults, **super().worker_env(local_rank, local_world_size, single_node)}

    def supports(self, precision: str) -> bool:
        """Whether the card supports ``precision``; bf16 and tf32 need compute capability 8."""
        import torch

        if precision in ("bf16", "tf32"):
            # torch.cuda.is_bf16_supported is also true for cards that emulate bf16, slowly.
            return torch.cuda.get_device_capability()[0] >= _AMPERE
        return super().supports(precision)

    def set_precision(self, precision: str) -> None:
        """Turn TF32 on or off for matrix products, convolutions (torch's default is on) and RNNs.

        Raises:
            ConfigError: NVIDIA_TF32_OVERRIDE, which overrides torch's switches, contradicts ``precision``.
        """
        import torch

        allowed = precision == "tf32"
        overrule = os.environ.get("NVIDIA_TF32_OVERRIDE")
        if precision in FLOAT32 and overrule == str(int(not allowed)):
            raise ConfigError(f"NVIDIA_TF32_OVERRIDE={overrule} overrules precision={precision}", "unset it")
        super().set_precision(precision)
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed
        if hasattr(torch.backends.cudnn, "conv"):
            # torch >= 2.9 has newer switches, and raises on reading an old one if the two disagree: set both.
            switches: Any = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
            for switch in switches:
                switch.fp32_precision = "tf32" if allowed else "ieee"

    def usage(self) -> dict[str, Any]:
        """Also the utilization, if the vendor's library (nvidia-ml-py or amdsmi) is installed."""
        usage = super().usage()
        with contextlib.suppress(Exception):  # the library is not installed, or has no access to the driver
            usage["utilization_percent"] = float(self.torch_module.utilization())
        return usage

    def packages(self) -> dict[str, str | None]:
        """Versions of the CUDA that torch was built for, and of the driver."""
        return {"cuda": _probe.torch_build()["cuda"], "driver": self.driver_version()}

    def monitor(self) -> list[dict[str, Any]]:
        """Readings of nvidia-smi."""
        return _monitor.nvidia_smi()

    def driver_version(self) -> str | None:
        """Version of the kernel driver; None if there is no driver, or it has no version of its own."""
        return self._driver.read_text(encoding="ascii").strip() if self._driver.is_file() else None

    def device_info(self, device: torch.device) -> dict[str, Any]:
        """Name, total memory in bytes, driver and identity of the card (``uuid``: torch >= 2.4; ``bus_id``: later)."""
        properties = self.torch_module.get_device_properties(device)
        described = {**super().device_info(device), "driver": self.driver_version()}
        pci: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        if None not in pci:
            described["bus_id"] = "{:04x}:{:02x}:{:02x}.0".format(*pci)
        card = self._card(device.index)
        if card is not None:
            return {**described, "card": card}
        return {**described, "visible": _probe.visible_name(device.index, *self.visible_variables)}

    def _card(self, index: int) -> int | None:
        """Number on this host of the card with torch's ``index``; None: the variables name cards otherwise (UUIDs)."""
        return _probe.visible_card(index, "CUDA_VISIBLE_DEVICES")
