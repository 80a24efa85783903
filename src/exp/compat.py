"""What newer torch has, behind names that work on torch 1.10 too. The only module that compares torch versions."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager

import torch

__all__ = [
    "TORCH_VERSION",
    "autocast_disabled",
    "device_part_of",
    "has_fused_attention",
    "is_transformed",
    "recompute_in_backward",
    "safe_globals",
    "supports_composite_process_groups",
    "supports_python_process_groups",
]

TORCH_VERSION: tuple[int, int] = tuple(  # type: ignore[assignment]
    int(part) for part in torch.__version__.split(".")[:2]
)

safe_globals: Any = getattr(torch.serialization, "safe_globals", None)
"""Context in which ``weights_only=True`` admits more classes (torch >= 2.5); None: there is none."""


def supports_composite_process_groups() -> bool:
    """Whether ``init_process_group`` takes strings such as ``"cpu:gloo,x:y"`` (torch >= 2.0)."""
    return TORCH_VERSION >= (2, 0)


def supports_python_process_groups() -> bool:
    """Whether DDP calls the methods of a process group that is written in Python (torch >= 2.0)."""
    return TORCH_VERSION >= (2, 0)


def device_part_of(process_group: str, device_type: str) -> str:
    """The backend that a composite string gives to ``device_type``: ``("cpu:gloo,x:y", "x") -> "y"``."""
    if ":" not in process_group:
        return process_group
    parts = dict(part.split(":", 1) for part in process_group.split(","))
    return parts.get(device_type) or parts["cpu"]


def has_fused_attention() -> bool:
    """Whether ``torch.nn.functional.scaled_dot_product_attention`` exists (torch >= 2.0)."""
    return TORCH_VERSION >= (2, 0)


def autocast_disabled(device_type: str) -> ContextManager[Any]:
    """Context in which autocast is off for ``device_type``.

    torch refuses device types that it has no autocast for (below 2.0 all but two); nothing is to be turned off there.
    """
    try:
        return torch.autocast(device_type, enabled=False)
    except (AssertionError, RuntimeError):
        return contextlib.nullcontext()


def recompute_in_backward(module: Any, *inputs: Any) -> Any:
    """``module(*inputs)``, whose activations are not kept but computed again in the backward pass.

    Random draws are repeated as they were. torch < 1.11 knows only the reentrant form, which is blind to gradients
    where no input asks for one: there an input that does not is made to.
    """
    from torch.utils.checkpoint import checkpoint

    if TORCH_VERSION >= (1, 11):
        return checkpoint(module, *inputs, use_reentrant=False)
    first, *rest = inputs
    if not first.requires_grad:
        first = first.detach().requires_grad_()
    return checkpoint(module, first, *rest)


def is_transformed(value: Any) -> bool:
    """Whether a torch.func transform (torch >= 2.0) is at work on a tensor."""
    functorch = getattr(torch._C, "_functorch", None)
    if functorch is None or not isinstance(value, torch.Tensor):
        return False
    return bool(functorch.is_functorch_wrapped_tensor(value))
