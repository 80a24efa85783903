"""The vendor's operator statistics; need ``ENFLAME_PT_OP_DEBUG_CONFIG=op_statistics=true`` before the import."""

from __future__ import annotations

from torch_gcu import _C

__all__ = ["clear_op_statistics_info", "get_op_statistics_info"]

_FRAME = "#" * 97


def get_op_statistics_info() -> str:
    """Number of calls by operator, on the card or the CPU, as the summary part of the vendor's text."""
    uses = _C.uses_of_operators()
    if not uses:
        return "Torch_gcu Op Statistics no data!\n"
    lines = [f"{'Op name: ' + name:<60}Use count: {count}" for name, count in sorted(uses.items())]
    return "\n".join(["Torch_gcu Op Statistics", _FRAME.replace("#####", "#Summary", 1), *lines, _FRAME, ""])


def clear_op_statistics_info() -> None:
    """Reset the counters."""
    _C.reset_uses()
