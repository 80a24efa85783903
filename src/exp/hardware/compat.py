"""Compatibility with torch 1.10 and later: the only core module that compares torch versions."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any, Callable, ContextManager, Sequence

import torch

from exp.hardware.ports import listen_at

TORCH_VERSION: tuple[int, int] = tuple(  # type: ignore[assignment]
    int(part) for part in torch.__version__.split(".")[:2]
)


def serving_store(host: str, port: int, timeout: timedelta, world_size: int | None = None) -> Any:
    """A TCP store that this process serves, at the address of ``host`` alone, not on all interfaces (torch >= 2.0).

    Args:
        host: name or address that clients use.
        port: that clients use.
        timeout: of the store.
        world_size: number of clients to wait for; None: do not wait.

    Returns:
        The store; None if this process cannot serve it (:func:`exp.hardware.ports.listen_at`), or if this torch can
        only open a port by itself.
    """
    store = torch.distributed.TCPStore
    listener = listen_at(host, port) if "master_listen_fd" in str(store.__init__.__doc__) else None
    if listener is None:
        return None
    options: Any = {"is_master": True, "timeout": timeout, "master_listen_fd": listener.detach()}
    return store(host, port, world_size, wait_for_workers=world_size is not None, **options)


def supports_compilation() -> bool:
    """Whether modules can be compiled in place, by ``torch.nn.Module.compile`` (torch >= 2.3)."""
    return TORCH_VERSION >= (2, 3)


def is_compiling() -> bool:
    """Whether ``torch.compile`` or ``torch.export`` records the code that calls this function."""
    return supports_compilation() and torch.compiler.is_compiling()


def supports_gradient_hooks() -> bool:
    """Whether a hook can follow the accumulation of a parameter's gradient (torch >= 2.1)."""
    return TORCH_VERSION >= (2, 1)


def supports_composite_groups() -> bool:
    """Whether a process group may have one backend per device type, as ``"cpu:gloo,x:y"`` (torch >= 2.0)."""
    return TORCH_VERSION >= (2, 0)


def supports_full_sharding() -> bool:
    """Whether ``torch.distributed.fsdp.fully_shard`` can be used (torch >= 2.7)."""
    return TORCH_VERSION >= (2, 7)


def has_fused_attention() -> bool:
    """Whether ``torch.nn.functional.scaled_dot_product_attention`` exists (torch >= 2.0)."""
    return TORCH_VERSION >= (2, 0)


def plain_attention() -> ContextManager[Any]:
    """Context in which ``scaled_dot_product_attention`` uses plain products and a softmax.

    Uses torch's own switches, which apply to all devices, threads and models. Does nothing on torch < 2.3, which has
    switches for one vendor only.
    """
    if TORCH_VERSION < (2, 3):
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    context: ContextManager[Any] = sdpa_kernel(SDPBackend.MATH)
    return context


def supports_estimates() -> bool:
    """Whether a training step can run on tensors without memory, to count what it needs (torch >= 2.3)."""
    return TORCH_VERSION >= (2, 3)


def supports_export() -> bool:
    """Whether ``torch.export`` can record a model with a dynamic batch size, and save it (torch >= 2.5)."""
    return TORCH_VERSION >= (2, 5)


def supports_portable_operators() -> bool:
    """Whether ``torch.library`` can register Python kernels by device type (torch >= 2.2)."""
    return TORCH_VERSION >= (2, 2)


def supports_replay() -> bool:
    """Whether hooks on parameters and ``torch.autograd.grad`` see the same gradients (torch >= 2.0)."""
    return TORCH_VERSION >= (2, 0)


def autocast_disabled(device_type: str) -> ContextManager[Any]:
    """Context in which autocast is off for ``device_type``.

    For device types without autocast (all but two on torch < 2.0) torch raises; then there is nothing to turn off.
    """
    try:
        return torch.autocast(device_type, enabled=False)
    except (AssertionError, RuntimeError):
        return contextlib.nullcontext()


def dispatch_mode(call: Callable[[Any, Sequence[Any], dict[str, Any]], Any]) -> ContextManager[Any]:
    """Context in which ``call`` runs every operator that torch dispatches, also those of the backward pass.

    Args:
        call: takes the operator, its arguments and its keyword arguments, and returns the result. Operators that
            ``call`` itself calls are dispatched as usual.
    """
    from torch.utils import _python_dispatch

    mode = getattr(_python_dispatch, "TorchDispatchMode", None)
    if mode is None:  # torch 1.10 to 1.12: the mode is a tensor subclass

        class Tap(torch.Tensor):
            @classmethod
            def __torch_dispatch__(  # type: ignore[override]
                cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                guard = torch._C._DisableTorchDispatch()  # newer torch does this by itself
                try:
                    result = call(func, args, kwargs or {})
                    if type(result) is not tuple:
                        return result
                    # A gradient that is not needed is None, which this torch cannot return.
                    return tuple(torch.empty(0) if grad is None else grad for grad in result)
                finally:
                    del guard

        context: ContextManager[Any] = _python_dispatch.enable_python_mode(Tap)  # type: ignore[attr-defined]
        return context

    class Mode(mode):  # type: ignore[misc, valid-type]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return call(func, args, kwargs or {})

    return Mode()


def recompute_in_backward(module: Any, *inputs: Any) -> Any:
    """``module(*inputs)`` with activation checkpointing: activations are recomputed in the backward pass.

    Random numbers are the same in both passes. torch < 1.11 has only reentrant checkpointing, which computes no
    gradients if no input requires one; there the first input is made to require one.
    """
    from torch.utils.checkpoint import checkpoint

    if TORCH_VERSION >= (1, 11):
        return checkpoint(module, *inputs, use_reentrant=False)
    first, *rest = inputs
    if not first.requires_grad:
        first = first.detach().requires_grad_()
    return checkpoint(module, first, *rest)


def backward_with_modes(loss: torch.Tensor) -> None:
    """``loss.backward()`` that keeps torch function modes active for recomputed activations (torch >= 2.0).

    ``Tensor.backward`` suspends these modes, as does any function that takes the tensor itself.
    """
    if TORCH_VERSION >= (2, 7):
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss))
    else:
        torch.autograd.backward(loss)


def pin_memory_kwargs(device_type: str) -> dict[str, Any]:
    """``DataLoader`` arguments for batches in page-locked (pinned) memory for a device type."""
    # torch < 1.12 pins for one vendor only; torch >= 2.9 pins for the current accelerator.
    needs_device = (1, 12) <= TORCH_VERSION < (2, 9)
    return {"pin_memory": True, **({"pin_memory_device": device_type} if needs_device else {})}
