"""Functions that end a step, which runs the lazy graph.

The simulation computes immediately, and records which operations a real card would still have to run (see
:mod:`torch_gcu.simulator`). The functions here mark operations as run, as they would run on a real card.
"""

from __future__ import annotations

import collections
import enum
from typing import Any, Iterable, Sequence

import torch

from torch_gcu import _C
from torch_gcu._device import AnyDevice, check_index, index_of

__all__ = [
    "JitRunMode",
    "collect_buffers",
    "fetch_gradients",
    "manual_seed_all",
    "optimizer_step",
    "sync_lived_tensor",
    "synchronize",
    "unlazy",
]


class JitRunMode(enum.Enum):
    """How a graph is run; the simulation only counts the modes (:func:`torch_gcu.simulator.modes`)."""

    SYNC = 0
    ASYNC = 1
    SAFEASYNC = 2


modes: collections.Counter[str] = collections.Counter()
"""How often a graph was asked to run in each mode."""


def synchronize(device: AnyDevice = None) -> None:
    """Wait for the graphs that run on a card. Does not start any: operations in the lazy graph keep waiting."""
    check_index(index_of(device, optional=True))


def unlazy(tensors: Sequence[torch.Tensor], mode: JitRunMode = JitRunMode.SAFEASYNC) -> None:
    """Run only the operations that ``tensors`` need.

    Raises:
        TypeError: ``tensors`` is not a list of tensors on a card, or ``mode`` is not a :class:`JitRunMode`.
    """
    _note(mode)
    if not isinstance(tensors, (list, tuple)) or not all(_on_card(tensor) for tensor in tensors):
        raise TypeError("Tensors must be a list of GCU tensor.")
    _C.run(list(tensors))


def sync_lived_tensor(device: AnyDevice = None, mode: JitRunMode = JitRunMode.SAFEASYNC) -> None:
    """Run the operations that any live tensor on a card needs; by default on the current card."""
    _note(mode)
    card = index_of(device, optional=True)
    check_index(card)
    _C.run_live(card)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    extra_output: torch.Tensor | Sequence[torch.Tensor] | None = None,
    optimizer_args: dict[str, Any] | None = None,
    model: torch.nn.Module | None = None,
    mode: JitRunMode = JitRunMode.SAFEASYNC,
    device: AnyDevice = None,
) -> Any:
    """Call ``optimizer.step``, and run the lazy graph.

    Args:
        optimizer: its ``step`` is called first.
        extra_output: further tensors to compute, such as a loss that will be read; only used with ``model``.
        optimizer_args: keyword arguments of ``optimizer.step``.
        model: compute only parameters, optimizer state and the buffers of this model; other live tensors keep waiting.
            None: compute all live tensors of the card.
        mode: how the graph is run.
        device: card whose live tensors are computed, without ``model``; None: the current card.

    Returns:
        What ``optimizer.step`` returned.

    Raises:
        TypeError: ``optimizer``, ``model`` or ``mode`` is of another type.
    """
    _check_type(optimizer, torch.optim.Optimizer)
    result = optimizer.step(**(optimizer_args or {}))
    if model is None:
        sync_lived_tensor(device, mode)
        return result
    _check_type(model, torch.nn.Module)
    _note(mode)
    extra = [extra_output] if isinstance(extra_output, torch.Tensor) else list(extra_output or [])
    _C.run([tensor for tensor in (*_stepped(optimizer), *extra, *collect_buffers(model)) if _on_card(tensor)])
    return result


def _note(mode: JitRunMode) -> None:
    _check_type(mode, JitRunMode)
    modes[mode.name] += 1


def _stepped(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter.data
            yield from optimizer.state[parameter].values()


def collect_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers of a model."""
    _check_type(model, torch.nn.Module)
    return [buffer.data for buffer in model.buffers()]


def fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients of the parameters that an optimizer updates."""
    _check_type(optimizer, torch.optim.Optimizer)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad.data for parameter in parameters if parameter.grad is not None]


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all cards, which ``torch.manual_seed`` does not reach.

    Raises:
        ValueError: the seed does not fit into 32 bits.
    """
    seed = int(seed)
    if not 0 <= seed <= 0xFFFFFFFF:
        raise ValueError(f"Seed must be a uint32 number which is between 0~4294967295, got {seed}")
    _C.seed_all(seed)


def _on_card(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def _check_type(value: Any, expected: type) -> None:
    if not isinstance(value, expected):
        raise TypeError(f"Param must be {expected}, got {type(value)}")
