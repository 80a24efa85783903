"""LoRA: low-rank updates of frozen linear layers (Hu et al., arXiv 2106.09685)."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError
from exp.models.dropout import Dropout

__all__ = ["NO_UPDATES", "LoraSettings", "LowRank", "is_of_lora", "lora_settings", "merged", "settings_in", "updates"]

ATTENTION = ("q", "k", "v", "proj")
"""Projections of an attention: of queries, keys and values, and of what comes out."""

_SEPARATE = ("q", "k", "v")
_FEED_FORWARD = ("fc1", "fc2", "w1", "w2", "w3")
_NAME = re.compile(r"^(?:.*\.)?lora\.(\w+)\.(down|up|scale)$")


@dataclass(frozen=True)
class LoraSettings:
    """``model.lora``.

    Attributes:
        rank: of the updates; 0: there are none.
        alpha: updates are multiplied by alpha / rank.
        dropout: probability of dropping an input of an update.
        targets: which projections have one: ``attention``, ``mlp``, or names of their layers.
    """

    rank: int = 0
    alpha: float = 16.0
    dropout: float = 0.0
    targets: Sequence[str] = ("attention", "mlp")

    def layers(self, mlp: Sequence[str]) -> list[str]:
        """Names of the layers that ``targets`` means.

        Args:
            mlp: those of the feed-forward part.

        Raises:
            ConfigError: there is no such layer.
        """
        groups = {"attention": ATTENTION, "mlp": tuple(mlp)}
        known = (*ATTENTION, *mlp)
        chosen = [layer for target in self.targets for layer in groups.get(target, (target,))]
        unknown = [layer for layer in chosen if layer not in known]
        if unknown or not chosen:
            raise ConfigError(
                f"model.lora.targets={list(self.targets)} must name some of attention, mlp, {', '.join(known)}"
            )
        return [layer for layer in known if layer in chosen]


NO_UPDATES = LoraSettings()
"""Every layer as it is."""


def lora_settings(given: Mapping[str, Any] | None) -> LoraSettings:
    """``model.lora`` as it was given.

    Raises:
        ConfigError: a key is unknown, or a number out of range.
    """
    given = dict(given or {})
    known = [field.name for field in fields(LoraSettings)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"model.lora.{unknown[0]} is no key; there are {', '.join(known)}")
    settings = LoraSettings(**given)
    if settings.rank < 0 or settings.alpha <= 0.0 or not 0.0 <= settings.dropout < 1.0:
        raise ConfigError(
            f"model.lora: rank={settings.rank} must be 0 or more, alpha={settings.alpha} above 0, and "
            f"dropout={settings.dropout} a probability below 1"
        )
    return settings


class LowRank(nn.Module):
    """What is added to a linear layer's output: alpha / rank times up(down(x)). It begins as zero.

    The factor is a part of the state: so weights can be merged by what a checkpoint holds alone.

    Args:
        dim_in: of the layer.
        dim_out: likewise.
        settings: of rank, alpha and dropout.
    """

    def __init__(self, dim_in: int, dim_out: int, settings: LoraSettings) -> None:
        super().__init__()
        self.dropout = Dropout(settings.dropout)
        self.down = nn.Parameter(torch.empty(settings.rank, dim_in))
        self.up = nn.Parameter(torch.zeros(dim_out, settings.rank))
        self._factor = settings.alpha / settings.rank  # a number: narrow outputs stay so
        self.register_buffer("scale", torch.tensor(self._factor))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)  # as a linear layer's of torch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim_in) -> (..., dim_out)."""
        return F.linear(F.linear(self.dropout(x), self.down), self.up) * self._factor

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}scale" in state_dict:
            self._factor = float(state_dict[f"{prefix}scale"])


def updates(
    settings: LoraSettings, layers: Mapping[str, nn.Linear], parts: Mapping[str, nn.Linear] | None = None
) -> nn.ModuleDict:
    """The updates of a module's layers, by name, as far as they are chosen.

    Args:
        settings: says which; none where the rank is 0.
        layers: by name.
        parts: layers of which each name is an equal part of the output's elements.
    """
    chosen = nn.ModuleDict()
    if settings.rank:
        mlp = [name for name in layers if name not in ATTENTION] or _FEED_FORWARD
        names = settings.layers(mlp)
        sizes = {name: (layer.in_features, layer.out_features) for name, layer in layers.items()}
        for name, layer in (parts or {}).items():
            sizes[name] = (layer.in_features, layer.out_features // len(parts or {}))
        for name in names:
            if name in sizes:
                chosen[name] = LowRank(*sizes[name], settings)
    return chosen


def is_of_lora(name: str) -> bool:
    """Whether a tensor belongs to an update, not to the layer."""
    return _NAME.match(name) is not None


def settings_in(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The keys of the configuration that the updates in a state were made with; of none, rank 0 alone."""
    ranks = [value.shape[0] for key, value in state.items() if is_of_lora(key) and key.endswith(".down")]
    if not ranks:
        return {"model.lora.rank": 0}
    scales = [float(value) for key, value in state.items() if is_of_lora(key) and key.endswith(".scale")]
    layers = sorted({match.group(1) for match in map(_NAME.match, state) if match})
    settings: dict[str, Any] = {"model.lora.rank": ranks[0], "model.lora.targets": f"[{','.join(layers)}]"}
    if scales:
        settings["model.lora.alpha"] = float(f"{scales[0] * ranks[0]:.6g}")
    return settings


def merged(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state without updates, whose layers compute the same: W + scale * up @ down, in float32.

    Args:
        state: by the names of :class:`exp.vision.dinov3.backbone.VisionTransformer`, with any path before them.

    Returns:
        New tensors where there was an update; the others are those of ``state``.

    Raises:
        ConfigError: an update is there in part, or its layer is not.
    """
    plain = {key: value for key, value in state.items() if not is_of_lora(key)}
    for down in [key for key in state if is_of_lora(key) and key.endswith(".down")]:
        place, _, name = down[: -len(".down")].rpartition("lora.")
        layer, part = f"{place}{name}.weight", 0
        if name in _SEPARATE:
            layer, part = f"{place}qkv.weight", _SEPARATE.index(name)
        needed = [f"{place}lora.{name}.up", f"{place}lora.{name}.scale"]
        lacking = [key for key in (layer, *needed) if key not in state]
        if lacking:
            raise ConfigError(f"init_from: {down} is there without {', '.join(lacking)}: the update cannot be merged")
        up, scale = (state[key].float() for key in needed)
        weight = plain[layer]
        update = scale * (up @ state[down].float())
        new = weight.float().clone()
        rows = update.shape[0]
        new[part * rows : (part + 1) * rows] += update
        plain[layer] = new.to(weight.dtype)
    return plain
