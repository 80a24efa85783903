"""LoRA: low-rank updates of frozen linear layers (Hu et al., arXiv 2106.09685)."""

from __future__ import annotations

import re
from typing import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError
from exp.models.dropout import Dropout
from exp.vision.model_config import LoraConfig

__all__ = ["LowRank", "is_of_lora", "merged", "updates"]

_GROUPS = {"attention": ("q", "k", "v", "proj"), "mlp": ("fc1", "fc2", "w1", "w2", "w3")}
_NAME = re.compile(r"^(?:.*\.)?lora\.(\w+)\.(down|up|scale)$")


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


def updates(config: LoraConfig, layers: Mapping[str, tuple[int, int]]) -> nn.ModuleDict:
    """The updates of a module's layers, by name; empty if the rank is 0.

    Args:
        config: ``targets`` names the layers with an update.
        layers: inputs and outputs of each layer, by its name.

    Raises:
        ConfigError: ``targets`` names a layer that no size has.
    """
    if not config.rank:
        return nn.ModuleDict()
    chosen = [name for target in config.targets for name in _GROUPS.get(target, (target,))]
    known = [name for group in _GROUPS.values() for name in group]
    if not set(chosen) <= set(known):
        raise ConfigError(
            f"model.lora.targets={list(config.targets)} must name some of {', '.join([*_GROUPS, *known])}"
        )
    return nn.ModuleDict({name: LowRank(*layers[name], config) for name in known if name in chosen and name in layers})


def is_of_lora(name: str) -> bool:
    """Whether a tensor, by its name, belongs to a low-rank update."""
    return _NAME.match(name) is not None


def merged(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Merge updates into the weights of their layers: W + scale * up @ down, in float32.

    Args:
        state: tensors by the names of :class:`exp.vision.dinov3.backbone.VisionTransformer`, with any prefix.

    Returns:
        The state without updates: new tensors for layers with an update, else the tensors of ``state``.
    """
    plain = {key: value for key, value in state.items() if not is_of_lora(key)}
    for down in [key for key in state if is_of_lora(key) and key.endswith(".down")]:
        place, _, name = down[: -len(".down")].rpartition("lora.")
        part = "qkv".find(name)
        layer = f"{place}{name if part < 0 else 'qkv'}.weight"
        up, scale = f"{down[:-4]}up", f"{down[:-4]}scale"
        update = state[scale].float() * (state[up].float() @ state[down].float())
        new = plain[layer].float().clone()
        first = max(part, 0) * len(update)
        new[first : first + len(update)] += update
        plain[layer] = new.to(plain[layer].dtype)
    return plain
