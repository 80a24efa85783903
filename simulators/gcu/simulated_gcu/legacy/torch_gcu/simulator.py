"""What a simulated card knows of itself, and a real one would not tell."""

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
    """Operations of this process that a card would still have to run, because a live tensor needs them."""
    return _C.graph_counts()[0]


def largest_graph() -> int:
    """The most operations that ever waited at once; ``SIM_GCU_GRAPH_LIMIT`` bounds it."""
    return _C.graph_counts()[1]


def runs() -> int:
    """How many tensors' graphs have been run, by a read value or by the end of a step."""
    return _C.graph_counts()[2]


def fallbacks() -> dict[str, int]:
    """Calls by operator that the card would have sent to the CPU; ``SIM_GCU_STRICT=1`` makes them errors."""
    return dict(_C.fallbacks())


def reset_fallbacks() -> None:
    """Count fallbacks anew."""
    _C.reset_fallbacks()


def modes() -> dict[str, int]:
    """How often a graph was asked to run in each mode, by name such as ``SAFEASYNC``."""
    return dict(_step.modes)


def memory_allocated(card: int = 0) -> int:
    """Bytes that live tensors of this process hold on a card."""
    return _C.memory_use(card)[0]


def max_memory_allocated(card: int = 0) -> int:
    """The most bytes that this process ever held on a card."""
    return _C.memory_use(card)[1]
