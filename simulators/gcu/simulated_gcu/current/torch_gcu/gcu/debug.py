"""The vendor's statistics of operators, for ``ENFLAME_PT_OP_DEBUG_CONFIG=op_statistics=true`` set before the import."""

from __future__ import annotations

from torch_gcu import _C

__all__ = ["clear_op_statistics_info", "get_op_statistics_info"]

_FRAME = "#" * 97


def get_op_statistics_info() -> str:
    """How often each operator was used, wherever it ran: the summary of the vendor's text, without its parameters."""
    uses = _C.uses_of_operators()
    if not uses:
        return "Torch_gcu Op Statistics no data!\n"
    lines = [f"{'Op name: ' + name:<60}Use count: {count}" for name, count in sorted(uses.items())]
    return "\n".join(["Torch_gcu Op Statistics", _FRAME.replace("#####", "#Summary", 1), *lines, _FRAME, ""])


def clear_op_statistics_info() -> None:
    """Start counting anew."""
    _C.reset_uses()
