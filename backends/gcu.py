"""Enflame GCU cards, both generations of the vendor's plug-in ``torch_gcu``.

The current one (TopsRider 3.x) adds the device type ``gcu`` to recent torch, with ``torch.gcu`` and the collectives
``eccl``. The legacy one (TopsRider 2.x, torch 1.10) has the device type ``xla``, a lazy graph that every step must end,
and collectives and a DDP class of its own. Which one is installed shows in torch's version. Written from the vendor's
public sources and manuals; see docs/hardware.md for what was verified how.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from exp.backends import _monitor, _probe

from exp.backend import Backend
from exp.environment import version_of
from exp.errors import UnavailableError

if TYPE_CHECKING:
    import torch

__all__ = ["GcuBackend"]

_NO_SIMULATOR = (
    "backend.simulate=true needs the package simulated_gcu; install it from the repository: pip install simulators/gcu"
)

_COUNT_TIMEOUT_S = 60
_COUNT = {
    False: "import torch, torch_gcu; print('count', torch.gcu.device_count())",
    True: "import torch, torch_gcu; print('count', torch_gcu.device_count())",
}


def _gcu() -> Any:
    """The module ``torch.gcu``, which the plug-in adds."""
    import torch

    return torch.gcu  # type: ignore[attr-defined]


def _simulator() -> Any:
    return importlib.import_module("simulated_gcu")


def _why_not_simulated() -> str | None:
    """What is missing for simulated cards, or None."""
    if importlib.util.find_spec("simulated_gcu") is None:
        return _NO_SIMULATOR
    try:
        _simulator().generation()
    except RuntimeError as error:
        return str(error)
    return None


def is_legacy() -> bool:
    """Whether the installed torch is one that only the legacy plug-in goes with (< 2.0)."""
    return int((_probe.torch_build()["version"] or "2").split(".")[0]) < 2


@functools.lru_cache(maxsize=None)
def _count_cards(visible: str | None) -> tuple[int, str | None]:
    """Ask torch_gcu for its cards, in a process of its own: counting may make a context, and takes torch.

    Args:
        visible: TOPS_VISIBLE_DEVICES, which the plug-in reads itself; here it only tells answers apart.

    Returns:
        The number of cards, and why there is no answer, or None.
    """
    del visible
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT[is_legacy()]],
            capture_output=True,
            text=True,
            timeout=_COUNT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 0, f"no answer within {_COUNT_TIMEOUT_S} s"
    for line in done.stdout.splitlines():
        if line.startswith("count "):
            return int(line.split()[1]), None
    said = done.stderr.strip().splitlines()
    return 0, said[-1] if said else f"exit status {done.returncode}"


class GcuBackend(Backend):
    """GCU cards; constructing it gives the generation that goes with the installed torch."""

    device_type = "gcu"
    precisions = ("fp32", "bf16", "fp16")
    default_process_group = "cpu:gloo,gcu:eccl"
    has_simulator = True
    visible_variables = ("TOPS_VISIBLE_DEVICES",)
    variables = (
        "TOPS_VISIBLE_DEVICES",
        "ECCL_DEBUG",
        "ECCL_TIMEOUT",
        "ECCL_SOCKET_IFNAME",
        "ECCL_MAX_NCHANNELS",
        "ECCL_ASYNC_DISABLE",
        "ECCL_RUNTIME_3_0_ENABLE",
        "ENFLAME_LOG_DEBUG_LEVEL",
        "ENFLAME_LOG_DEBUG_MOD",
        "TORCH_GCU_ENABLE_INT64_AND_UINT64",
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "SIM_GCU_COUNT",
        "SIM_GCU_MEMORY",
        "SIM_GCU_STRICT",
    )

    def __new__(cls, *_args: Any, **_kwargs: Any) -> GcuBackend:
        """Choose the legacy class under torch < 2.0."""
        if cls is GcuBackend and is_legacy():
            from exp.backends.gcu_legacy import LegacyGcuBackend

            return super().__new__(LegacyGcuBackend)
        return super().__new__(cls)

    @property
    def forks_safely(self) -> bool:
        """Simulated cards alone: the vendor's plug-in loads with torch, and nobody has tried."""
        return self.simulate

    def why_unavailable(self) -> str | None:
        """What is missing: torch, the plug-in, or a visible card."""
        missing = _probe.torch_missing()
        if missing:
            return missing
        if self.simulate:
            return _why_not_simulated()
        if importlib.util.find_spec("torch_gcu") is None:
            return (
                f"looked for the package torch_gcu in {sys.executable} and found none; "
                "install the one that goes with torch from the vendor's TopsRider package, or make a dry run on "
                "simulated cards with backend.simulate=true"
            )
        count, problem = _count_cards(os.environ.get("TOPS_VISIBLE_DEVICES"))
        if problem:
            return (
                f"torch_gcu is installed, but cannot count its cards ({problem}); "
                "check the driver, and that LD_LIBRARY_PATH has the TOPS libraries"
            )
        if count == 0:
            return "torch_gcu is installed, but counts no card; check TOPS_VISIBLE_DEVICES and efsmi"
        return None

    def device_count(self) -> int:
        """Cards that torch_gcu counts, TOPS_VISIBLE_DEVICES respected; asked once per process."""
        if self.simulate:
            return 0 if _why_not_simulated() else _simulator().device_count()
        if _probe.torch_missing() or importlib.util.find_spec("torch_gcu") is None:
            return 0
        return _count_cards(os.environ.get("TOPS_VISIBLE_DEVICES"))[0]

    def prepare(self) -> None:
        """Compile the simulated card where it has not been yet; in a process of its own, because that takes torch."""
        if not self.simulate:
            return
        done = subprocess.run(
            [sys.executable, "-m", "simulated_gcu", "build"], stdout=subprocess.DEVNULL, stderr=None, check=False
        )
        if done.returncode != 0:
            raise UnavailableError(f"backend={self.name} backend.simulate=true: there is no simulated card; see above")

    def worker_env(self, local_rank: int, local_world_size: int, single_node: bool) -> dict[str, str]:
        """Simulated cards share the cores, and keep torch from loading a real plug-in before them."""
        defaults = {}
        if self.simulate:
            cores = len(os.sched_getaffinity(0))
            defaults = {
                "OMP_NUM_THREADS": str(max(1, cores // local_world_size)),
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            }
        return {**defaults, **super().worker_env(local_rank, local_world_size, single_node)}

    def _plugin(self) -> Any:
        """The vendor's package, or the simulated one; importing it registers the device, and twice is harmless."""
        if self.simulate:
            _simulator().activate()
        return importlib.import_module("torch_gcu")

    def set_device(self, local_rank: int) -> torch.device:
        """Select the card; imports the plug-in, which must be there before the process group is made."""
        import torch

        self._plugin()
        count = _gcu().device_count()
        self._check_rank(local_rank, count)
        _gcu().set_device(local_rank)
        return torch.device(self.device_type, local_rank)

    @staticmethod
    def _check_rank(local_rank: int, count: int) -> None:
        if local_rank >= count:
            raise UnavailableError(
                f"local_rank {local_rank} has no card: torch_gcu sees {count}; lower nproc or set TOPS_VISIBLE_DEVICES"
            )

    def collectives_missing(self) -> str | None:
        """Whether torch_gcu has registered eccl."""
        import torch.distributed as dist

        if hasattr(dist.Backend, "ECCL"):
            return None
        return "torch_gcu has registered no process group 'eccl' (is the ECCL library of the TopsRider package there?)"

    def supports(self, precision: str) -> bool:
        """bf16 only where the card has it."""
        if precision == "bf16":
            return bool(_gcu().is_bf16_supported())
        return super().supports(precision)

    def grad_scaler(self, precision: str) -> Any | None:
        """The vendor's scaler."""
        if precision != "fp16":
            return None
        return _gcu().amp.GradScaler()

    def seed(self, seed: int) -> None:
        """Seed every visible card."""
        _gcu().manual_seed_all(seed)

    def rng_state(self) -> torch.Tensor | None:
        """State of the current card's generator."""
        state: torch.Tensor = _gcu().get_rng_state()
        return state.cpu()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore the current card's generator."""
        _gcu().set_rng_state(state)

    def synchronize(self) -> None:
        """Wait for the current card."""
        _gcu().synchronize()

    def memory(self) -> dict[str, int]:
        """Bytes on the current card."""
        return {
            "allocated": _gcu().memory_allocated(),
            "max_allocated": _gcu().max_memory_allocated(),
            "total": _gcu().mem_get_info()[1],
        }

    def free_memory(self) -> tuple[int, int] | None:
        """Of the current card."""
        free, total = _gcu().mem_get_info()
        return int(free), int(total)

    def packages(self) -> dict[str, str | None]:
        """The plug-in."""
        if self.simulate:
            return {"simulated torch_gcu": version_of("exp-simulated-gcu")}
        return {"torch_gcu": version_of("torch_gcu") or version_of("torch-gcu")}

    def monitor(self) -> list[dict[str, Any]]:
        """What efsmi says; nothing of simulated cards."""
        return [] if self.simulate else _monitor.efsmi()

    def describe(self, device: torch.device) -> dict[str, Any]:
        """Name, index and total memory in bytes of the card, and its number on the host."""
        properties = _gcu().get_device_properties(device.index)
        described = {"name": properties.name, "index": device.index, "memory": properties.total_memory}
        return {**described, **place_of(device.index)}


def place_of(index: int) -> dict[str, Any]:
    """The card's number on the host, or the name that the variable gives it."""
    card = _probe.visible_card(index, "TOPS_VISIBLE_DEVICES")
    return {"visible": _probe.visible_name(index, "TOPS_VISIBLE_DEVICES")} if card is None else {"card": card}
