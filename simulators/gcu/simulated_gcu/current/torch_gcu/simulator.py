"""Counters that only the simulated card has: operators run on the CPU, copies, waits and kernel launches."""

from __future__ import annotations

import torch

from torch_gcu import _C

__all__ = [
    "fallback_bytes",
    "fallbacks",
    "launches",
    "reset_fallbacks",
    "reset_traffic",
    "traffic",
    "waits",
]


def fallbacks() -> dict[str, int]:
    """Number of calls that ran on the CPU instead of the card, by operator such as ``aten::gelu_backward``."""
    return {name: calls for name, (calls, _) in _C.fallbacks().items()}


def fallback_bytes() -> dict[str, int]:
    """Bytes that these calls would copy over the bus, for the tensors that they read and write, by operator."""
    return {name: size for name, (_, size) in _C.fallbacks().items()}


def reset_fallbacks() -> None:
    """Reset the counters of :func:`fallbacks` and :func:`fallback_bytes`."""
    _C.reset_fallbacks()


def traffic() -> dict[str, tuple[int, int]]:
    """Number and bytes of the copies ``to card``, ``to host`` and ``within`` cards, without those of fallbacks."""
    found = _C.traffic()
    return {name: found.get(name, (0, 0)) for name in ("to card", "to host", "within")}


def waits() -> dict[str, int]:
    """How often the process would have waited for a card, by cause.

    Causes are operators whose result is a number or a shape that only the card knows; ``device``, ``stream`` and
    ``event`` for explicit synchronization; ``to card`` and ``to host`` for copies without pinned memory or without
    ``non_blocking=True``.
    """
    return {name[5:]: calls for name, (calls, _) in _C.traffic().items() if name.startswith("wait ")}


def launches() -> dict[str, int]:
    """Number of kernel launches by operator; needs ``ENFLAME_PT_OP_DEBUG_CONFIG=op_statistics=true``.

    Views and allocations launch no kernel; copies within a card are counted under ``within``.
    """
    found = {name: calls for name, calls in _C.uses_of_operators().items() if not _is_view(name)}
    within = traffic()["within"][0]
    return {**found, **({"within": within} if within else {})}


def reset_traffic() -> None:
    """Reset the counters of :func:`traffic`, :func:`waits` and :func:`launches`."""
    _C.reset_traffic()
    _C.reset_uses()


def _is_view(name: str) -> bool:
    space, _, full = name.partition("::")
    base, _, overload = full.partition(".")
    schema = getattr(getattr(getattr(torch.ops, space), base), overload or "default")._schema
    return any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
