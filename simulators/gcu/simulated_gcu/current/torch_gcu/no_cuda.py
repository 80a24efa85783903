"""Makes calls of ``torch.cuda`` that would use a card raise: a GCU machine has no CUDA.

A CPU build of torch refuses most such calls by itself. But the functions below do nothing or return zeros, so a program
that calls them passes its tests, and then measures no memory on the cluster. Not changed are probes such as
``torch.cuda.is_available``, and ``manual_seed_all``, which torch itself calls.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

__all__ = ["guard"]

_SILENT = (
    "empty_cache",
    "ipc_collect",
    "manual_seed",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
)


def guard() -> None:
    """Make these functions raise; does nothing on a machine that has CUDA."""
    if torch.cuda.is_available():
        return
    for name in _SILENT:
        function = getattr(torch.cuda, name, None)
        if function is not None and not hasattr(function, "refused_by_simulated_gcu"):
            setattr(torch.cuda, name, _refusing(name, function))


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(f"torch.cuda.{name} was called on a GCU machine, which has no CUDA device; use torch.gcu")

    refuse.refused_by_simulated_gcu = True  # type: ignore[attr-defined]
    return refuse
