"""Environment variables of GCU cards: those for reports, and those that have no effect or do harm."""

from __future__ import annotations

import os
from typing import Sequence

__all__ = [
    "INDUCTOR", "REPORTED", "counting_env", "environment_warnings", "is_counting", "is_on", "unset_wide_integers",
]  # fmt: skip

_UNREAD = ("GCU_VISIBLE_DEVICES",)
_DEBUG = "ENFLAME_PT_OP_DEBUG_CONFIG"
_STATISTICS = "op_statistics=true"
_INT64 = "TORCH_GCU_ENABLE_INT64_AND_UINT64"
INDUCTOR = "TORCHGCU_INDUCTOR_ENABLE"
"""Must be 1 before the plug-in is imported for ``torch.compile`` on these cards."""

REPORTED = (
    "TOPS_", "GCU_", "ECCL_", "TORCH_ECCL_", "TORCH_GCU_", "TORCHGCU_", "PYTORCH_GCU_", "PYTORCH_NO_GCU_",
    "PYTORCH_EFML_", "USE_GCU_", "ENFLAME_CLUSTER_", "ENFLAME_ENABLE_", "ENFLAME_LOG_", "ENFLAME_PT_", "ENFLAME_TORCH_",
    "ENFLAME_UMD_", "ENABLE_I64_CHECK", "ENABLE_RDMA", "TORCHDYNAMO_DISABLE", "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "SIM_GCU_",
)  # fmt: skip
"""Beginnings of the names of variables that change how these cards behave, for both generations."""


def unset_wide_integers(major: int | None) -> list[str]:
    """Remove the variable for 64-bit integers, which crashes the process on an S60; the plug-in reads it per operator.

    Args:
        major: major version of the card's architecture (3: S60); None: an older generation, or not known.

    Returns:
        The removed variables, as ``NAME=value``.
    """
    return [f"{_INT64}={os.environ.pop(_INT64)}"] if major == 3 and is_on(_INT64) else []


def environment_warnings(unset: Sequence[str]) -> list[str]:
    """Warnings about variables of this process that have no effect, or were removed because they do harm.

    Args:
        unset: the removed ones (:func:`unset_wide_integers`).
    """
    lines = [
        f"{name}={os.environ[name]}: nothing reads it; TOPS_VISIBLE_DEVICES chooses the cards"
        for name in _UNREAD
        if name in os.environ
    ]
    lines += [
        f"{setting} was unset for this process: this card has no kernels for 64-bit integers, and adding them ends it; "
        "unset it yourself"
        for setting in unset
    ]
    return lines


def is_counting() -> bool:
    """Whether the plug-in counts operators. It reads its variable as words separated by spaces, ignoring case."""
    return _STATISTICS in os.environ.get(_DEBUG, "").lower().split(" ")


def counting_env() -> dict[str, str]:
    """The variable that makes the plug-in count operators, with the words that the user has set."""
    return {_DEBUG: os.environ[_DEBUG] if is_counting() else f"{os.environ.get(_DEBUG, '')} {_STATISTICS}".strip()}


def is_on(name: str) -> bool:
    """Whether a boolean variable is set to a true value."""
    return os.environ.get(name, "").strip().lower() in ("1", "true", "on", "yes")
