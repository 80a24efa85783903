"""LoRA (Hu et al., arXiv 2106.09685): low-rank updates of the frozen linear layers of any backbone.

An update belongs to a layer, as its submodule ``lora``, and is added to the layer's output. A layer that computes
several projections at once names them in its attribute ``parts``, and may have an update for each.
"""

from __future__ import annotations

import re
from typing import Any, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError
from exp.models.dropout import Dropout
from exp.vision.keys import LoraConfig

__all__ = ["LowRank", "add_updates", "is_lora", "merge_lora", "merge_updates"]

_NAME = re.compile(r"^(?:(.*)\.)?lora\.(\w+)\.(?:down|up|scale)$")


class LowRank(nn.Module):
    """A low-rank update, which is added to a linear layer's output: alpha / rank times up(down(x)); initially zero.

    The factor is part of the state dict, so that a checkpoint is enough to merge weights.

    Args:
        dim_in: inputs of the layer.
        dim_out: outputs of the layer.
        config: ``rank``, ``alpha`` and ``dropout`` are read.
    """

    scale: torch.Tensor

    def __init__(self, dim_in: int, dim_out: int, config: LoraConfig) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        self.down = nn.Parameter(torch.empty(config.rank, dim_in))
        self.up = nn.Parameter(torch.zeros(dim_out, config.rank))
        self.register_buffer("scale", torch.tensor(config.alpha / config.rank))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)  # like torch's nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim_in) -> (..., dim_out)."""
        # A 0-dim factor does not promote the dtype under autocast.
        return F.linear(F.linear(self.dropout(x), self.down), self.up) * self.scale


def add_updates(
    backbone: nn.Module, units: Sequence[nn.Module], config: LoraConfig, groups: Mapping[str, Sequence[str]]
) -> None:
    """Add updates to linear layers, and freeze everything else.

    Args:
        backbone: the network.
        units: its modules whose layers may have updates.
        config: ``targets`` names the layers.
        groups: names for sets of layers.

    Raises:
        ConfigError: ``targets`` names a layer or a set that the backbone does not have.
    """
    layers = {name: layer for name, layer in backbone.named_modules() if isinstance(layer, nn.Linear)}
    names = sorted({part for name, layer in layers.items() for part in _parts(name, layer)})
    sets: dict[str, Sequence[str]] = {"all": names, **groups}
    selected = {name for target in config.targets for name in sets.get(target, [target])}
    known = {*names, *(name for group in groups.values() for name in group)}
    if not selected <= known or not selected.intersection(names):
        raise ConfigError(
            f"model.lora.targets={list(config.targets)} must name some of {', '.join(['all', *groups, *names])}"
        )
    backbone.requires_grad_(False)
    inside = {id(module) for unit in units for module in unit.modules()}
    if not inside:
        raise ConfigError("model.lora: model.freeze leaves no layer that could have updates")
    for name, layer in layers.items():
        parts = _parts(name, layer)
        chosen = [part for part in parts if part in selected]
        if id(layer) in inside and chosen:
            dim_out = layer.out_features // len(parts)
            layer.lora = nn.ModuleDict({part: LowRank(layer.in_features, dim_out, config) for part in chosen})
            layer.register_forward_hook(_add_update)


def _parts(name: str, layer: Any) -> Sequence[str]:
    """The names of a layer's projections: usually one, the last part of the layer's name."""
    parts: Sequence[str] = getattr(layer, "parts", (name.rpartition(".")[2],))
    return parts


def _add_update(layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """A hook after a layer's forward."""
    updates = getattr(layer, "lora", None)
    if updates is None:  # merged
        return output
    names = getattr(layer, "parts", tuple(updates))
    chunks = output.chunk(len(names), dim=-1)
    outputs = [part + updates[name](inputs[0]) if name in updates else part for name, part in zip(names, chunks)]
    return torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]


def is_lora(name: str) -> bool:
    """Whether a tensor, by its name, belongs to a low-rank update."""
    return _NAME.match(name) is not None


def merge_lora(state: Mapping[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Merge updates into the weights of their layers: W + scale * up @ down, in float32.

    Args:
        state: tensors by the names of ``model``.
        model: has the layers, with or without updates.

    Returns:
        The state without updates: new tensors for layers with an update, else the tensors of ``state``.
    """
    merged = {key: value for key, value in state.items() if not is_lora(key)}
    for key, down in state.items():
        match = _NAME.match(key)
        if match is None or not key.endswith(".down"):
            continue
        layer, name = match.groups()
        update = state[f"{key[:-4]}scale"].float() * (state[f"{key[:-4]}up"].float() @ down.float())
        weight = merged[f"{layer}.weight"].float().clone()
        first = _parts(layer, model.get_submodule(layer)).index(name) * len(update)
        weight[first : first + len(update)] += update
        merged[f"{layer}.weight"] = weight.to(merged[f"{layer}.weight"].dtype)
    return merged


def merge_updates(model: nn.Module) -> None:
    """Add the updates of a model to its weights, and remove them; outputs stay the same."""
    state = merge_lora(model.state_dict(), model)
    for module in [*model.modules()]:
        if hasattr(module, "lora"):
            del module.lora
    model.load_state_dict(state)
