"""Ending steps: what runs the lazy graph.

The simulation computes at once, and keeps account of what a real card would still have to run (see
:mod:`torch_gcu.simulator`). The functions here run what they would run there.
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
    """How a graph is run; all the same in the simulation, which counts them (:func:`torch_gcu.simulator.modes`)."""

    SYNC = 0
    ASYNC = 1
    SAFEASYNC = 2


modes: collections.Counter[str] = collections.Counter()
"""How often a graph was asked to run in each mode."""


def synchronize(device: AnyDevice = None) -> None:
    """Wait for the graphs that run on a card. Starts none: what still waits in the lazy graph goes on waiting."""
    check_index(index_of(device, optional=True))


def unlazy(tensors: Sequence[torch.Tensor], mode: JitRunMode = JitRunMode.SAFEASYNC) -> None:
    """Run what ``tensors`` need, and no more.

    Raises:
        TypeError: it is not a list of tensors on a card, or ``mode`` is no mode.
    """
    _note(mode)
    if not isinstance(tensors, (list, tuple)) or not all(_on_card(tensor) for tensor in tensors):
        raise TypeError("Tensors must be a list of GCU tensor.")
    _C.run(list(tensors))


def sync_lived_tensor(device: AnyDevice = None, mode: JitRunMode = JitRunMode.SAFEASYNC) -> None:
    """Run what every live tensor on a card needs; the current card where none is given."""
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
    """Take the optimizer's step, and end the step of the graph.

    Args:
        optimizer: takes its step first.
        extra_output: with ``model`` only: tensors to run as well, such as a loss that will be read.
        optimizer_args: keyword arguments of ``optimizer.step``.
        model: run parameters, optimizer state and this model's buffers only; whatever else is alive goes on waiting.
            None: run what every live tensor of the card needs.
        mode: how the graph is run.
        device: whose live tensors, without ``model``; the current card where none is given.

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
