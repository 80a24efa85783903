"""Counters that only the simulated card has: waiting operations, graphs, fallbacks and memory."""

from __future__ import annotations

from torch_gcu import _C, _step

__all__ = [
    "fallbacks",
    "largest_graph",
    "max_memory_allocated",
    "memory_allocated",
    "modes",
    "pending",
    "reset_fallbacks",
    "runs",
]


def pending() -> int:
    """Number of operations that a card would still have to run because a live tensor of this process needs them."""
    return _C.graph_counts()[0]


def largest_graph() -> int:
    """Largest number of operations that waited at once; ``SIM_GCU_GRAPH_LIMIT`` is its limit."""
    return _C.graph_counts()[1]


def runs() -> int:
    """Number of tensors whose graphs were run, by reading a value or by the end of a step."""
    return _C.graph_counts()[2]


def fallbacks() -> dict[str, int]:
    """Number of calls that the card would run on the CPU, by operator; ``SIM_GCU_STRICT=1`` makes them errors."""
    return dict(_C.fallbacks())


def reset_fallbacks() -> None:
    """Reset the counters of :func:`fallbacks`."""
    _C.reset_fallbacks()


def modes() -> dict[str, int]:
    """How often a graph was asked to run in each mode, by name such as ``SAFEASYNC``."""
    return dict(_step.modes)


def memory_allocated(card: int = 0) -> int:
    """Bytes of live tensors of this process on a card."""
    return _C.memory_use(card)[0]


def max_memory_allocated(card: int = 0) -> int:
    """Largest number of bytes that this process held on a card."""
    return _C.memory_use(card)[1]
