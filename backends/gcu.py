"""Enflame GCU cards, both generations of the vendor's plug-in ``torch_gcu``.

The current one (TopsRider 3.x) adds the device type ``gcu`` to recent torch, with ``torch.gcu`` and the collectives
``eccl``. The legacy one (TopsRider 2.x, torch 1.10) has the device type ``xla``, a lazy graph that every step must end,
and collectives and a DDP class of its own. Which one is installed shows in torch's version. Written from the vendor's
public sources and manuals; see docs/hardware/hardware.md for what was verified how.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

from exp.backends import _efml, _gcu_operators, _monitor, _probe
from exp.backends._gcu_environment import INDUCTOR, REPORTED, cautions, counting, is_counting, unset_wide_integers
from exp.backends._probe import AUTOLOAD

from exp.errors import UnavailableError
from exp.hardware.backend import FLOAT32, Backend, Capabilities, Collectives, ask
from exp.runs.record import version_of

if TYPE_CHECKING:
    import torch

__all__ = ["GcuBackend"]

_VISIBLE = "TOPS_VISIBLE_DEVICES"
_TOPS = Path("/opt/tops")
_NO_SIMULATOR = (
    "backend.simulate=true needs the package simulated_gcu; install it from the repository: pip install simulators/gcu"
)


def _simulator() -> Any:
    return importlib.import_module("simulated_gcu")


def _why_not_simulated() -> str | None:
    """What is missing for simulated cards, or None. A process with torch compiles them, the first time."""
    if importlib.util.find_spec("simulated_gcu") is None:
        return _NO_SIMULATOR
    try:
        _simulator().device_count()
    except RuntimeError as error:
        return str(error)
    if importlib.import_module("simulated_gcu.build").cached_extension().is_file():
        return None
    done = subprocess.run([sys.executable, "-m", "simulated_gcu", "build"], stdout=subprocess.DEVNULL, check=False)
    return "there is no simulated card; see above" if done.returncode else None


class GcuBackend(Backend):
    """GCU cards; constructing it gives the generation that goes with the installed torch."""

    device_type = "gcu"
    collectives = Collectives("cpu:gloo,gcu:eccl")
    visible_variables = (_VISIBLE,)
    variables = REPORTED
    count_script = "import torch, torch_gcu; print('answer', torch.gcu.device_count())"
    """Has the plug-in count its cards."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> GcuBackend:
        """Choose the legacy class under torch < 2.0."""
        if cls is GcuBackend and _is_legacy():
            from exp.backends.gcu_legacy import LegacyGcuBackend

            return super().__new__(LegacyGcuBackend)
        return super().__new__(cls)

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """What the vendor's lists say of the current card's architecture, less ``options.native``.

        Only simulated cards let workers fork: the vendor's plug-in loads with torch, and nobody has tried. Attention in
        float32 on a card that is not known to take it ends the process, without an error.
        """
        major = self._architecture()
        return Capabilities(
            precisions=("fp32", "bf16", "fp16"),
            fused_attention=("bf16", "fp16", *(FLOAT32 if major in _gcu_operators.FLOAT32_ATTENTION else ())),
            lacking_operators=_gcu_operators.lacking(major, tuple(self.options.get("native", ()))),
            uncompiled=self._why_not_compiled(major),
            pinned_memory=True,
            forking=self.simulate,
            simulation=True,
        )

    def _architecture(self) -> int:
        """The major of the current card's; S60's (3), or that of simulated cards, in a process without the plug-in."""
        if "torch_gcu" in sys.modules:
            return int(self.module.get_device_capability()[0])
        return {"s60": 3, "l600": 4}.get(os.environ.get("SIM_GCU_PROFILE", ""), 0) if self.simulate else 3

    def _why_not_compiled(self, major: int) -> str | None:
        if major == 3:  # they have 64-bit integers
            return "compiled kernels fail, or end the process, on cards of this architecture (3: S60)"
        if not self.simulate and os.environ.get(INDUCTOR) != "1":
            return f"the plug-in compiles only with {INDUCTOR}=1 before it is imported (+backend.env.{INDUCTOR}=1)"
        return None

    def why_unavailable(self) -> str | None:
        """What is missing: torch, the plug-in, or a visible card."""
        missing = _probe.torch_missing()
        if missing:
            return missing
        if self.simulate:
            return _why_not_simulated()
        if importlib.util.find_spec("torch_gcu") is None:
            return (
                f"looked for the package torch_gcu in {sys.executable} and found none; {_how_to_install()}, or make a "
                "dry run on simulated cards with backend.simulate=true"
            )
        count, problem = self._counted()
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
            return int(_simulator().device_count())
        if _probe.torch_missing() or importlib.util.find_spec("torch_gcu") is None:
            return 0
        return self._counted()[0]

    def _counted(self) -> tuple[int, str | None]:
        """The number of visible cards, and why there is no answer, or None."""
        cards = visible_cards()
        if cards is not None:
            return len(cards), None
        count, problem = _probe.ask_torch(self.count_script, "0", (os.environ.get(_VISIBLE),))
        return count or 0, problem

    def worker_env(self, local_rank: int, local_world_size: int, single_node: bool) -> dict[str, str]:
        """The plug-in is imported by :attr:`module`: one whose runtime is missing would break ``import torch``."""
        return {AUTOLOAD: "0", **super().worker_env(local_rank, local_world_size, single_node)}

    @property
    def module(self) -> Any:
        """``torch.gcu``, which the plug-in adds."""
        import torch

        self._plugin()
        return torch.gcu  # type: ignore[attr-defined]

    def _plugin(self) -> Any:
        """The vendor's package, or the simulated one; importing it registers the device, and twice is harmless."""
        if self.simulate and "torch_gcu.simulator" not in sys.modules:
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
        """Select the card; the plug-in registers its collectives, too, as it is imported."""
        device = super().set_device(local_rank)
        unset_wide_integers(getattr(ask(self.module, "get_device_properties", local_rank), "major", None))
        return device

    def supports(self, precision: str) -> bool:
        """bf16 only where the card has it."""
        return super().supports(precision) and (precision != "bf16" or bool(self.module.is_bf16_supported()))

    def usage(self) -> dict[str, Any]:
        """Also what the management library says of the current card; nothing of simulated cards."""
        found = super().usage()
        cards = None if self.simulate else visible_cards()
        index = self.module.current_device() if cards else 0
        for card in _efml.readings(cards[index]) if cards and index < len(cards) else ():
            found["utilisation_percent"] = card["utilisation_percent"]
        return {key: value for key, value in found.items() if value is not None}

    def run_env(self, precision: str, counts_fallbacks: bool) -> dict[str, str]:
        """The vendor's statistics of operators, which take more than is worth it in a training."""
        if self.simulate:
            return _probe.NO_CUDA
        return counting() if counts_fallbacks else {}

    def fallbacks(self) -> Mapping[str, tuple[int, int]] | None:
        """Simulated cards count them; real ones where ENFLAME_PT_OP_DEBUG_CONFIG asks for ``op_statistics=true``."""
        if self.simulate:
            told = importlib.import_module("torch_gcu.simulator")
            sizes = told.fallback_bytes() if hasattr(told, "fallback_bytes") else {}
            return {name.partition("::")[2]: (calls, sizes.get(name, 0)) for name, calls in told.fallbacks().items()}
        if not is_counting():
            return None
        statistics = self.module.debug.get_op_statistics_info()
        return _gcu_operators.counted(statistics, self.capabilities.lacking_operators)

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
        return {**super().describe(device), **self._place(device.index)}

    def _place(self, index: int) -> dict[str, Any]:
        """The card's number on the host and its UUID, as far as they are known, or its name in the variable."""
        cards = None if self.simulate else visible_cards()
        if cards is not None and index < len(cards):
            known = next(iter(_efml.readings(cards[index])), {"uuid": None})
            return {"card": cards[index], **({"uuid": known["uuid"]} if known["uuid"] else {})}
        card = _probe.visible_card(index, _VISIBLE)
        return {"visible": _probe.visible_name(index, _VISIBLE)} if card is None else {"card": card}


def _is_legacy() -> bool:
    """Whether the installed torch is one that only the legacy plug-in goes with (< 2.0)."""
    return int((_probe.torch_build()["version"] or "2").split(".")[0]) < 2


def visible_cards() -> list[int] | None:
    """Numbers on the host of the visible cards, by the management library; None where only the plug-in can tell."""
    total, visible = _efml.count(), os.environ.get(_VISIBLE)
    if total is None:
        return None
    names = [] if visible is None else visible.split(",")
    if all(name.strip().lstrip("-").isdigit() or not name.strip() for name in names):
        return [_probe.visible_card(index, _VISIBLE) or 0 for index in range(_probe.count_visible(total, _VISIBLE))]
    if not all(name.strip().startswith("GCU-") for name in names):
        return None  # parts of cards
    found = [_efml.card_of(name) for name in names]  # as the plug-in: a name after a space is none
    known = [card for card in found[: (*found, None).index(None)] if card is not None]
    return known if len(set(known)) == len(known) else []


def _how_to_install() -> str:
    """Where the plug-in may be that this interpreter does not see."""
    packages = sorted(_TOPS.glob("lib/python3*/site-packages/torch_gcu"))
    if packages:
        return f"it is in {packages[0].parent}: put that on PYTHONPATH, in an environment of the same Python version"
    if _TOPS.is_dir():
        return f"{_TOPS} is there, so the system's Python may have it: use python -m venv --system-site-packages"
    return "install the one that goes with torch from the vendor's TopsRider package"
