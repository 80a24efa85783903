"""Enflame GCU cards, both generations of the vendor's plug-in ``torch_gcu``.

The current one (TopsRider 3.x) adds the device type ``gcu`` to recent torch, with ``torch.gcu`` and the collectives
``eccl``. The legacy one (TopsRider 2.x, torch 1.10) has the device type ``xla``, a lazy graph that every step must end,
and collectives and a DDP class of its own. Which one is installed shows in torch's version. Written from the vendor's
public sources and manuals; see docs/hardware.md for what was verified how.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Mapping

from exp.backends import _efml, _gcu_operators, _monitor, _probe
from exp.backends._gcu_cards import VISIBLE, count_cards, how_to_install, is_legacy, visible_cards
from exp.backends._gcu_environment import INDUCTOR, REPORTED, cautions, counting, is_counting, unset_wide_integers

from exp.environment import version_of
from exp.errors import UnavailableError
from exp.hardware.backend import FLOAT32, Backend

if TYPE_CHECKING:
    import torch

__all__ = ["GcuBackend"]

_NO_SIMULATOR = (
    "backend.simulate=true needs the package simulated_gcu; install it from the repository: pip install simulators/gcu"
)


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
        _simulator().device_count()
    except RuntimeError as error:
        return str(error)
    return None


class GcuBackend(Backend):
    """GCU cards; constructing it gives the generation that goes with the installed torch."""

    device_type = "gcu"
    precisions = ("fp32", "bf16", "fp16")
    default_process_group = "cpu:gloo,gcu:eccl"
    has_simulator = True
    pins_memory = True
    visible_variables = ("TOPS_VISIBLE_DEVICES",)
    variables = REPORTED
    loads_plugins = False

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
                f"looked for the package torch_gcu in {sys.executable} and found none; {how_to_install()}, or make a "
                "dry run on simulated cards with backend.simulate=true"
            )
        count, problem = count_cards()
        if problem:
            return (
                f"torch_gcu is installed, but cannot count its cards ({problem}); "
                f"{self._remedy(problem, 'check the driver, and that')}"
            )
        if count == 0:
            return "torch_gcu is installed, but counts no card; check TOPS_VISIBLE_DEVICES and efsmi"
        return None

    def device_count(self) -> int:
        """Cards that the management library counts, else torch_gcu, TOPS_VISIBLE_DEVICES respected."""
        if self.simulate:
            return 0 if _why_not_simulated() else _simulator().device_count()
        if _probe.torch_missing() or importlib.util.find_spec("torch_gcu") is None:
            return 0
        return count_cards()[0]

    def prepare(self) -> None:
        """Compile the simulated card where it has not been yet; in a process of its own, because that takes torch."""
        if not self.simulate:
            return
        done = subprocess.run(
            [sys.executable, "-m", "simulated_gcu", "build"], stdout=subprocess.DEVNULL, stderr=None, check=False
        )
        if done.returncode != 0:
            raise UnavailableError(f"backend={self.name} backend.simulate=true: there is no simulated card; see above")

    def _plugin(self) -> Any:
        """The vendor's package, or the simulated one; importing it registers the device, and twice is harmless."""
        if self.simulate:
            _simulator().activate()
        try:
            return importlib.import_module("torch_gcu")
        except Exception as error:  # it changes torch as it loads: one that does not fit may raise anything
            said = (str(error).splitlines() or ["no message"])[0]
            raise UnavailableError(
                f"torch_gcu does not import ({type(error).__name__}: {said}); {self._remedy(said, 'check that')}"
            ) from error

    def _remedy(self, problem: str, check: str) -> str:
        version = None if self.simulate else self.packages()["torch_gcu"]
        return _probe.built_for_another(problem, version) or f"{check} LD_LIBRARY_PATH has the TOPS libraries"

    def set_device(self, local_rank: int) -> torch.device:
        """Select the card; imports the plug-in, which must be there before the process group is made."""
        import torch

        self._plugin()
        count = _gcu().device_count()
        self._check_rank(local_rank, count)
        _gcu().set_device(local_rank)
        unset_wide_integers(getattr(_gcu().get_device_properties(local_rank), "major", None))
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

    def utilisation(self) -> float | None:
        """What the management library says of the current card; nothing of simulated cards."""
        cards = None if self.simulate or is_legacy() else visible_cards()
        index = _gcu().current_device() if cards else 0
        return _efml.utilisation(cards[index]) if cards and index < len(cards) else None

    def free_memory(self) -> tuple[int, int] | None:
        """Of the current card."""
        free, total = _gcu().mem_get_info()
        return int(free), int(total)

    def lacking_operators(self) -> frozenset[str]:
        """The vendor's lists for the current card, less ``options.native``; nothing is known of legacy cards."""
        if is_legacy():
            return frozenset()
        return _gcu_operators.lacking(self._architecture(), self.options.get("native", ()))

    def _architecture(self) -> int:
        """The major of the current card's; S60's (3), or that of simulated cards, in a process without the plug-in."""
        if "torch_gcu" in sys.modules:
            return int(_gcu().get_device_capability()[0])
        return {"s60": 3, "l600": 4}.get(os.environ.get("SIM_GCU_PROFILE", ""), 0) if self.simulate else 3

    def fused_attention(self, precision: str) -> bool:
        """Not in float32, but on the cards that are known to take it: others end the process, without an error."""
        if is_legacy() or precision not in FLOAT32:
            return True
        return self._architecture() in _gcu_operators.FLOAT32_ATTENTION

    def why_not_compiled(self) -> str | None:
        """S60: compiled kernels fail there, or end the process, where they have 64-bit integers."""
        if _gcu().get_device_capability()[0] == 3:
            return "compiled kernels fail, or end the process, on cards of this architecture (3: S60)"
        if not self.simulate and os.environ.get(INDUCTOR) != "1":
            return f"the plug-in compiles only with {INDUCTOR}=1 before it is imported (+backend.env.{INDUCTOR}=1)"
        return None

    def fallbacks(self) -> Mapping[str, tuple[int, int]] | None:
        """Simulated cards count them; real ones where ENFLAME_PT_OP_DEBUG_CONFIG asks for ``op_statistics=true``."""
        if self.simulate:
            told = importlib.import_module("torch_gcu.simulator")
            sizes = {} if is_legacy() else told.fallback_bytes()
            return {name.partition("::")[2]: (calls, sizes.get(name, 0)) for name, calls in told.fallbacks().items()}
        if is_legacy() or not is_counting():
            return None
        return _gcu_operators.counted(_gcu().debug.get_op_statistics_info(), self.lacking_operators())

    def counting_env(self) -> dict[str, str]:
        """The vendor's statistics; simulated cards count anyway, and the legacy generation has none."""
        return {} if self.simulate or is_legacy() else counting()

    def packages(self) -> dict[str, str | None]:
        """The plug-in."""
        if self.simulate:
            return {"simulated torch_gcu": version_of("exp-simulated-gcu")}
        return {"torch_gcu": version_of("torch_gcu") or version_of("torch-gcu")}

    def monitor(self) -> list[dict[str, Any]]:
        """What the management library says, or efsmi where it is missing; nothing of simulated cards."""
        return [] if self.simulate else _efml.readings() or _monitor.efsmi()

    def cautions(self) -> list[str]:
        """Variables that nothing reads, and the one that breaks the S60."""
        return cautions()

    def describe(self, device: torch.device) -> dict[str, Any]:
        """Name, index and total memory in bytes of the card, and what tells it from the others of its host."""
        about = _gcu().get_device_properties(device.index)
        return {"name": about.name, "index": device.index, "memory": about.total_memory, **self._place(device.index)}

    def _place(self, index: int) -> dict[str, Any]:
        """The card's number on the host and its UUID, as far as they are known, or its name in the variable."""
        cards = None if self.simulate else visible_cards()
        if cards is not None and index < len(cards):
            uuid = _efml.uuids().get(cards[index])
            return {"card": cards[index], **({"uuid": uuid} if uuid else {})}
        card = _probe.visible_card(index, VISIBLE)
        return {"visible": _probe.visible_name(index, VISIBLE)} if card is None else {"card": card}
