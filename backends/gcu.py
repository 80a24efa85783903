"""Enflame GCU cards, both generations of the vendor's plug-in ``torch_gcu``.

The current generation (TopsRider 3.x) adds the device type ``gcu`` to recent torch, with ``torch.gcu`` and the
collectives ``eccl``. The legacy generation (TopsRider 2.x, torch 1.10) has the device type ``xla``, a lazy graph that
every step must end, and its own collectives and DDP class. torch's version decides which one is used. Written from the
vendor's public sources and manuals; see docs/hardware/hardware.md for what was verified how.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Mapping

from exp.backends import _gcu_operators, _monitor, _probe
from exp.backends._gcu_environment import (
    INDUCTOR,
    REPORTED,
    counting_env,
    environment_warnings,
    is_counting,
    unset_wide_integers,
)
from exp.backends._probe import AUTOLOAD

from exp.errors import UnavailableError
from exp.hardware.backend import FLOAT32, Backend, Capabilities, Collectives, call_if_present
from exp.hardware.environment import version_of

if TYPE_CHECKING:
    import torch

__all__ = ["GcuBackend"]

_VISIBLE = "TOPS_VISIBLE_DEVICES"
_LIBRARY = ("libefml.so.1", ("efmlInit_v2", "efmlInitV2", "efmlInit"), "efmlDeviceGetCount_v2")
_NO_SIMULATOR = (
    "backend.simulate=true needs the package simulated_gcu; install it from the repository: pip install simulators/gcu"
)


def _simulator() -> Any:
    return importlib.import_module("simulated_gcu")


def _why_not_simulated() -> str | None:
    """What is missing for simulated cards, or None. The first time, they are compiled, in a process of its own."""
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


class GcuBackend(Backend, options=("native",)):
    """GCU cards. The constructor returns the class of the generation that fits the installed torch."""

    device_type = "gcu"
    collectives = Collectives("cpu:gloo,gcu:eccl")
    visible_variables = (_VISIBLE,)
    count_script = "import torch, torch_gcu; print('answer', torch.gcu.device_count())"
    """Script in which the plug-in counts its cards (:func:`exp.backends._probe.ask_torch`)."""
    _unset: tuple[str, ...] = ()
    """Variables that :meth:`set_device` has removed from the environment."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> GcuBackend:
        """Choose the legacy class with torch < 2.0."""
        if cls is GcuBackend and _is_legacy():
            from exp.backends.gcu_legacy import LegacyGcuBackend

            return super().__new__(LegacyGcuBackend)
        return super().__new__(cls)

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """What the current card's architecture can do by the vendor's lists, with ``options.native`` as additions.

        Workers are forked on simulated cards only: with the vendor's plug-in, which loads with torch, it is untested.
        Fused attention in float32 is allowed only on cards known to support it; others crash without an error.
        """
        major = self._architecture()
        return Capabilities(
            precisions=("fp32", "bf16", "fp16"),
            fused_attention=("bf16", "fp16", *(FLOAT32 if major in _gcu_operators.FLOAT32_ATTENTION else ())),
            lacking_operators=_gcu_operators.lacking_operators(major, tuple(self.options.get("native", ()))),
            uncompiled=self._why_not_compiled(major),
            pinned_memory=True,
            reported_env=REPORTED,
            forking=self.simulate,
            simulation=True,
        )

    def _architecture(self) -> int:
        """Major version of the current card's architecture; without the plug-in 3 (S60), or that of simulated cards."""
        if "torch_gcu" in sys.modules:
            return int(self.torch_module.get_device_capability()[0])
        return {"s60": 3, "l600": 4}.get(os.environ.get("SIM_GCU_PROFILE", ""), 0) if self.simulate else 3

    def _why_not_compiled(self, major: int) -> str | None:
        if major == 3:  # compiled kernels contain 64-bit integers
            return "compiled kernels fail, or end the process, on cards of this architecture (3: S60)"
        if not self.simulate and os.environ.get(INDUCTOR) != "1":
            return f"the plug-in compiles only with {INDUCTOR}=1 before it is imported (+backend.env.{INDUCTOR}=1)"
        return None

    def unavailable_reason(self) -> str | None:
        """What is missing: the plug-in, or a visible card; None: nothing."""
        if self.simulate:
            return _why_not_simulated()
        if importlib.util.find_spec("torch_gcu") is None:
            return (
                f"looked for the package torch_gcu in {sys.executable} and found none; install the one that goes with "
                "torch from the vendor's TopsRider package, use the Python of the vendor's image (python -m venv "
                "--system-site-packages), or make a dry run on simulated cards with backend.simulate=true"
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
        """Number of visible cards by the management library, or else by torch_gcu; respects TOPS_VISIBLE_DEVICES."""
        if self.simulate:
            return int(_simulator().device_count())
        return 0 if importlib.util.find_spec("torch_gcu") is None else self._counted()[0]

    def _counted(self) -> tuple[int, str | None]:
        """The number of visible cards, and why there is no answer, or None; only the plug-in knows cards by name."""
        total, names = _probe.cards_by_library(*_LIBRARY), os.environ.get(_VISIBLE, "").split(",")
        if total is not None and all(name.strip().lstrip("-").isdigit() or not name.strip() for name in names):
            return _probe.count_visible(total, _VISIBLE), None
        count, problem = _probe.ask_torch(self.count_script, "0", (os.environ.get(_VISIBLE),))
        return count or 0, problem

    def worker_env(self, local_rank: int, local_world_size: int, single_node: bool) -> dict[str, str]:
        """Keep torch from loading the plug-in: without its runtime it would break ``import torch``.

        :attr:`torch_module` imports the plug-in.
        """
        return {AUTOLOAD: "0", **super().worker_env(local_rank, local_world_size, single_node)}

    @property
    def torch_module(self) -> Any:
        """``torch.gcu``, which the plug-in adds; imports the plug-in."""
        import torch

        self._plugin()
        return torch.gcu  # type: ignore[attr-defined]

    def _plugin(self) -> Any:
        """Import the vendor's package, or the simulated one, which registers the device; may be called repeatedly.

        Raises:
            UnavailableError: the package cannot be imported.
        """
        if self.simulate and "torch_gcu.simulator" not in sys.modules:
            _simulator().activate()
        try:
            return importlib.import_module("torch_gcu")
        except Exception as error:  # the plug-in patches torch: one for another torch may raise anything
            reason = (str(error).splitlines() or ["no message"])[0]
            raise UnavailableError(
                f"torch_gcu does not import ({type(error).__name__}: {reason})", f"{self._remedy(reason, 'check that')}"
            ) from error

    def _remedy(self, problem: str, check: str) -> str:
        version = None if self.simulate else self.packages()["torch_gcu"]
        return _probe.built_for_another(problem, version) or f"{check} LD_LIBRARY_PATH has the TOPS libraries"

    def set_device(self, local_rank: int) -> torch.device:
        """Select the card; importing the plug-in also registers its collectives."""
        device = super().set_device(local_rank)
        properties = call_if_present(self.torch_module, "get_device_properties", local_rank)
        self._unset = (*self._unset, *unset_wide_integers(getattr(properties, "major", None)))
        return device

    def supports(self, precision: str) -> bool:
        """Whether the card supports ``precision``; for bf16 the plug-in is asked."""
        return super().supports(precision) and (precision != "bf16" or bool(self.torch_module.is_bf16_supported()))

    def run_env(self, precision: str, counts_fallbacks: bool) -> dict[str, str]:
        """Turn on the vendor's operator statistics if the run counts fallbacks; they slow training down."""
        if self.simulate:
            return _probe.NO_CUDA
        return counting_env() if counts_fallbacks else {}

    def fallbacks(self) -> Mapping[str, tuple[int, int]] | None:
        """Operators that ran on the CPU; on real cards only with ENFLAME_PT_OP_DEBUG_CONFIG=op_statistics=true."""
        if self.simulate:
            simulator = importlib.import_module("torch_gcu.simulator")
            sizes = simulator.fallback_bytes() if hasattr(simulator, "fallback_bytes") else {}
            return {
                name.partition("::")[2]: (calls, sizes.get(name, 0)) for name, calls in simulator.fallbacks().items()
            }
        if not is_counting():
            return None
        statistics = self.torch_module.debug.get_op_statistics_info()
        return _gcu_operators.operator_counts(statistics, self.capabilities.lacking_operators)

    def packages(self) -> dict[str, str | None]:
        """Version of the plug-in."""
        if self.simulate:
            return {"simulated torch_gcu": version_of("exp-simulated-gcu")}
        return {"torch_gcu": version_of("torch_gcu") or version_of("torch-gcu")}

    def monitor(self) -> list[dict[str, Any]]:
        """Readings of efsmi; empty for simulated cards."""
        return [] if self.simulate else _monitor.efsmi()

    def warnings(self) -> list[str]:
        """Warnings about variables that nothing reads, and about the one that crashes the S60."""
        return environment_warnings(self._unset)

    def device_info(self, device: torch.device) -> dict[str, Any]:
        """Name, index, total memory, and number on the host of the card, or its entry in TOPS_VISIBLE_DEVICES."""
        card = _probe.visible_card(device.index, _VISIBLE)
        position = {"visible": _probe.visible_name(device.index, _VISIBLE)} if card is None else {"card": card}
        return {**super().device_info(device), **position}


def _is_legacy() -> bool:
    """Whether the installed torch needs the legacy plug-in (torch < 2.0)."""
    return int((_probe.torch_build()["version"] or "2").split(".")[0]) < 2
