"""Environment variables of GCU cards: those for reports, and those that have no effect or do harm."""

from __future__ import annotations

import os

__all__ = ["INDUCTOR", "REPORTED", "cautions", "counting", "is_counting", "is_on", "unset_wide_integers"]

_UNREAD = ("GCU_VISIBLE_DEVICES",)
_DEBUG = "ENFLAME_PT_OP_DEBUG_CONFIG"
_STATISTICS = "op_statistics=true"
_INT64 = "TORCH_GCU_ENABLE_INT64_AND_UINT64"
INDUCTOR = "TORCHGCU_INDUCTOR_ENABLE"
"""Must be 1 before the plug-in is imported for ``torch.compile`` on these cards."""

_unset: list[str] = []
"""Variables that this process has removed from its environment, as ``NAME=value``."""

REPORTED = (
    "TOPS_VISIBLE_DEVICES", *_UNREAD, "TOPS_LAUNCH_BLOCKING", "TOPS_HOME",
    "ECCL_DEBUG", "ECCL_TIMEOUT", "ECCL_SOCKET_IFNAME", "ECCL_MAX_NCHANNELS", "ECCL_MIN_NCHANNELS", "ECCL_IB_HCA",
    "ECCL_ASYNC_DISABLE", "ECCL_RUNTIME_3_0_ENABLE", "ECCL_BUFFSIZE", "ECCL_PROTO", "ECCL_ALGO", "ECCL_SHM_DISABLE",
    "ECCL_CUMEM_ENABLE", "ECCL_ALLTOALLV_MAXSIZE",
    "TORCH_ECCL_BLOCKING_WAIT", "TORCH_ECCL_ASYNC_ERROR_HANDLING", "TORCH_ECCL_DESYNC_DEBUG",
    "TORCH_ECCL_DUMP_ON_TIMEOUT", "TORCH_ECCL_ENABLE_TIMING", "TORCH_ECCL_ENABLE_MONITORING",
    "TORCH_ECCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_ECCL_TRACE_BUFFER_SIZE", "TORCH_ECCL_COORD_CHECK_MILSEC",
    "TORCH_ECCL_AVOID_RECORD_STREAMS", "TORCH_ECCL_ABORT_IN_DESTROY_PG",
    "TORCH_ECCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "TORCH_GCU_ECCL_SIP_NUM",
    "PYTORCH_GCU_ALLOC_CONF", "PYTORCH_NO_GCU_MEMORY_CACHING", "PYTORCH_EFML_BASED_GCU_CHECK", "USE_GCU_DEFAULT_STREAM",
    INDUCTOR, "TORCHDYNAMO_DISABLE", _DEBUG, "ENFLAME_PT_ENABLE_LINEAR_OVERRIDE", "ENFLAME_PT_GELU_ERF_ENABLE",
    "ENFLAME_TORCH_GCU_ENABLE_AUTO_MIGRATION", "ENFLAME_UMD_FLAGS", "ENFLAME_LOG_DEBUG_LEVEL", "ENFLAME_LOG_DEBUG_MOD",
    "ENABLE_I64_CHECK", _INT64,
    # used in trainings on the T20
    "ENFLAME_CLUSTER_PARALLEL", "ENFLAME_PT_ENABLE_HBM_INPLACE", "ENFLAME_PT_EVALUATE_TENSOR_NEEDED",
    "ENFLAME_PT_AOT_CFG", "ENFLAME_ENABLE_EFP", "ENFLAME_ENABLE_TF32", "ENABLE_RDMA",
    "TORCH_DEVICE_BACKEND_AUTOLOAD", "SIM_GCU_COUNT", "SIM_GCU_MEMORY", "SIM_GCU_PROFILE", "SIM_GCU_STRICT",
)  # fmt: skip
"""Variables that change how these cards behave, for both generations."""


def unset_wide_integers(major: int | None) -> None:
    """Remove the variable for 64-bit integers, which crashes the process on an S60; the plug-in reads it per operator.

    Args:
        major: major version of the card's architecture (3: S60); None: an older generation, or not known.
    """
    if major == 3 and is_on(_INT64):
        _unset.append(f"{_INT64}={os.environ.pop(_INT64)}")


def cautions() -> list[str]:
    """Warnings about variables of this process that have no effect, or were removed because they do harm."""
    found = [
        f"{name}={os.environ[name]}: nothing reads it; TOPS_VISIBLE_DEVICES chooses the cards"
        for name in _UNREAD
        if name in os.environ
    ]
    found += [
        f"{each} was unset for this process: this card has no kernels for 64-bit integers, and adding them ends it; "
        "unset it yourself"
        for each in _unset
    ]
    return found


def is_counting() -> bool:
    """Whether the plug-in counts operators. It reads its variable as words separated by spaces, ignoring case."""
    return _STATISTICS in os.environ.get(_DEBUG, "").lower().split(" ")


def counting() -> dict[str, str]:
    """The variable that makes the plug-in count operators, with the words that the user has set."""
    return {_DEBUG: os.environ[_DEBUG] if is_counting() else f"{os.environ.get(_DEBUG, '')} {_STATISTICS}".strip()}


def is_on(name: str) -> bool:
    """Whether a boolean variable is set to a true value."""
    return os.environ.get(name, "").strip().lower() in ("1", "true", "on", "yes")
