"""One process with several cards: the vendor's DistributedDataParallel with ``device_ids=None``.

Each batch is divided among the cards, and every card computes its part with a copy of the model. The copies are made
once. Their gradients are not reduced, and the optimizer does not update them: in the public sources of the vendor's
class only the first card's parameters reach the reducer. Programs should avoid this mode. It is modeled so that a
program that uses it by mistake shows it, in the memory of the other cards and in its results.
"""

from __future__ import annotations

import copy
from typing import Any, Sequence

import torch
from torch import nn

import torch_gcu

__all__ = ["gather", "replicate", "run_replicas", "scatter_arguments"]


def replicate(module: nn.Module, cards: Sequence[int]) -> list[nn.Module]:
    """The module itself for the first card, and a copy of it on every other card."""
    return [module, *(copy.deepcopy(module).to(f"xla:{card}") for card in cards[1:])]


def scatter_arguments(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], cards: Sequence[int], dim: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Divide the tensors among the arguments along ``dim`` over the cards; other arguments go to all cards.

    Returns:
        Arguments for each card; for fewer cards if a tensor has fewer pieces.
    """
    pieces = _scatter((inputs, kwargs), [torch.device("xla", card) for card in cards], dim)
    return [(tuple(inputs), kwargs) for inputs, kwargs in pieces]


def _scatter(value: Any, devices: list[torch.device], dim: int) -> list[Any]:
    if isinstance(value, torch.Tensor):
        pieces = value.chunk(len(devices), dim) if len(devices) > 1 else [value]
        return [piece.to(device) for piece, device in zip(pieces, devices)]
    if isinstance(value, (list, tuple)) and value:
        columns = [_scatter(item, devices, dim) for item in value]
        return [type(value)(row) for row in zip(*columns)]
    if isinstance(value, dict) and value:
        columns = [_scatter(item, devices, dim) for item in value.values()]
        return [dict(zip(value, row)) for row in zip(*columns)]
    return [value for _ in devices]


def run_replicas(
    replicas: Sequence[nn.Module], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], cards: Sequence[int]
) -> list[Any]:
    """Call each replica with its arguments, on its card."""
    outputs = []
    for replica, card, (inputs, kwargs) in zip(replicas, cards, arguments):
        with torch_gcu.device(card):
            outputs.append(replica(*inputs, **kwargs))
    return outputs


def gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Concatenate the outputs of all cards on ``device`` along ``dim``; 0-dim tensors become a vector."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        moved = [output.to(device) for output in outputs]
        return torch.cat(moved, dim) if first.dim() else torch.stack(moved)
    if isinstance(first, dict):
        return {key: gather([output[key] for output in outputs], device, dim) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(gather(column, device, dim) for column in zip(*outputs))
    return first
