"""What only the simulated card has: what a real one would send to the CPU and back, and wait for."""

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
    """How often each operator was run on the CPU instead of the card, by name such as ``aten::gelu_backward``."""
    return {name: calls for name, (calls, _) in _C.fallbacks().items()}


def fallback_bytes() -> dict[str, int]:
    """Bytes that those calls would take over the bus: of the tensors that they read and of those that they write."""
    return {name: size for name, (_, size) in _C.fallbacks().items()}


def reset_fallbacks() -> None:
    """Forget what :func:`fallbacks` has counted."""
    _C.reset_fallbacks()


def traffic() -> dict[str, tuple[int, int]]:
    """Calls and bytes of the copies ``to card``, ``to host`` and ``within`` cards; those of fallbacks are apart."""
    found = _C.traffic()
    return {name: found.get(name, (0, 0)) for name in ("to card", "to host", "within")}


def waits() -> dict[str, int]:
    """How often the process would have waited for a card, by what made it wait.

    Operators that give a number or a shape which only the card knows; ``device``, ``stream`` and ``event``, where the
    program asks for it; and ``to card`` and ``to host``, for copies that are not from or to pinned memory, or are not
    asked to go on by themselves (``non_blocking``).
    """
    return {name[5:]: calls for name, (calls, _) in _C.traffic().items() if name.startswith("wait ")}


def launches() -> dict[str, int]:
    """How often kernels ran, by operator: under ``ENFLAME_PT_OP_DEBUG_CONFIG=op_statistics=true`` only.

    Views and allocations launch nothing; a copy within a card is one, ``within``.
    """
    found = {name: calls for name, calls in _C.uses_of_operators().items() if not _is_view(name)}
    within = traffic()["within"][0]
    return {**found, **({"within": within} if within else {})}


def reset_traffic() -> None:
    """Forget what :func:`traffic`, :func:`waits` and :func:`launches` have counted."""
    _C.reset_traffic()
    _C.reset_uses()


def _is_view(name: str) -> bool:
    space, _, full = name.partition("::")
    base, _, overload = full.partition(".")
    schema = getattr(getattr(getattr(torch.ops, space), base), overload or "default")._schema
    return any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
