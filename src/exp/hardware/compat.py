"""What newer torch has, behind names that work on torch 1.10 too. The only module that compares torch versions."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from socket import socket
from typing import Any, Callable, ContextManager, Sequence

import torch

__all__ = [
    "TORCH_VERSION", "autocast_disabled", "backward_below_modes", "every_operator", "forbid_fused_attention",
    "has_fused_attention", "pinned_by", "recompute_in_backward", "serving_store", "supports_compilation",
    "supports_composite_groups", "supports_estimates", "supports_export", "supports_full_sharding",
    "supports_portable_operators",
]  # fmt: skip

TORCH_VERSION: tuple[int, int] = tuple(  # type: ignore[assignment]
    int(part) for part in torch.__version__.split(".")[:2]
)


def serving_store(host: str, port: int, listener: socket, timeout: timedelta, world_size: int | None = None) -> Any:
    """A TCP store that serves at the address of ``listener`` alone (torch >= 2.0); None: torch opens its own port.

    Args:
        host: as clients name it.
        port: of ``listener``.
        listener: listens; the store closes it.
        timeout: of the store.
        world_size: clients to wait for; None: none.
    """
    store = torch.distributed.TCPStore
    if "master_listen_fd" not in str(store.__init__.__doc__):
        listener.close()
        return None
    options: Any = {"is_master": True, "timeout": timeout, "master_listen_fd": listener.detach()}
    return store(host, port, world_size, wait_for_workers=world_size is not None, **options)


def supports_compilation() -> bool:
    """Whether a module compiles in place, by ``torch.nn.Module.compile`` (torch >= 2.3)."""
    return TORCH_VERSION >= (2, 3)


def supports_composite_groups() -> bool:
    """Whether a process group may be composed, as ``"cpu:gloo,x:y"`` (torch >= 2.0)."""
    return TORCH_VERSION >= (2, 0)


def supports_full_sharding() -> bool:
    """Whether ``torch.distributed.fsdp.fully_shard`` and what goes with it exist (torch >= 2.7)."""
    return TORCH_VERSION >= (2, 7)


def has_fused_attention() -> bool:
    """Whether ``torch.nn.functional.scaled_dot_product_attention`` exists (torch >= 2.0)."""
    return TORCH_VERSION >= (2, 0)


def forbid_fused_attention() -> None:
    """Have ``scaled_dot_product_attention`` be made of products and a softmax, for the rest of this process.

    By torch's own switches, which hold for every device and thread, and for users' models; torch < 2.3 has none but a
    vendor's.
    """
    if TORCH_VERSION >= (2, 3):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        _never_left.enter_context(sdpa_kernel(SDPBackend.MATH))


_never_left = contextlib.ExitStack()
"""Contexts that would undo what they do once nothing refers to them."""


def supports_estimates() -> bool:
    """Whether a training step can be taken on tensors without memory, and what it makes be counted (torch >= 2.1)."""
    return TORCH_VERSION >= (2, 1)


def supports_export() -> bool:
    """Whether a program is recorded with a free batch size, and saved (torch >= 2.5)."""
    return TORCH_VERSION >= (2, 5)


def supports_portable_operators() -> bool:
    """Whether kernels can be registered from Python for a type of device, whatever key it has (torch >= 2.2)."""
    return TORCH_VERSION >= (2, 2)


def autocast_disabled(device_type: str) -> ContextManager[Any]:
    """Context in which autocast is off for ``device_type``.

    torch refuses device types that it has no autocast for (below 2.0 all but two); nothing is to be turned off there.
    """
    try:
        return torch.autocast(device_type, enabled=False)
    except (AssertionError, RuntimeError):
        return contextlib.nullcontext()


def every_operator(call: Callable[[Any, Sequence[Any], dict[str, Any]], Any]) -> ContextManager[Any]:
    """Context in which every operator that torch dispatches, those of the backward pass too, is left to ``call``.

    Args:
        call: is given the operator, its arguments and its keyword arguments, and returns what it gives. What it calls
            itself is dispatched as ever.
    """
    from torch.utils import _python_dispatch

    mode = getattr(_python_dispatch, "TorchDispatchMode", None)
    if mode is None:  # torch 1.10 to 1.12: the mode is a class of tensors

        class Tap(torch.Tensor):
            @classmethod
            def __torch_dispatch__(  # type: ignore[override]
                cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                guard = torch._C._DisableTorchDispatch()  # newer torch does so by itself
                try:
                    result = call(func, args, kwargs or {})
                    if type(result) is not tuple:
                        return result
                    # A gradient that nobody asks for is None, which this torch cannot hand on.
                    return tuple(torch.empty(0) if each is None else each for each in result)
                finally:
                    del guard

        context: ContextManager[Any] = _python_dispatch.enable_python_mode(Tap)  # type: ignore[attr-defined]
        return context

    class Mode(mode):  # type: ignore[misc, valid-type]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return call(func, args, kwargs or {})

    return Mode()


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


def backward_below_modes(loss: torch.Tensor) -> None:
    """``loss.backward()`` that leaves modes of torch's functions on, for what is recomputed (torch >= 2.0).

    Methods and functions that take the tensor itself suspend them.
    """
    if TORCH_VERSION >= (2, 7):
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss))
    else:
        torch.autograd.backward(loss)


def pinned_by(device_type: str) -> dict[str, Any]:
    """Arguments of a ``DataLoader`` that puts batches into page-locked memory for a type of device."""
    # Before 1.12 there is one vendor to lock memory for; from 2.9 on it is the current accelerator's.
    named = (1, 12) <= TORCH_VERSION < (2, 9)
    return {"pin_memory": True, **({"pin_memory_device": device_type} if named else {})}
