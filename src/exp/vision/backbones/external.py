"""Networks of two other libraries, timm and transformers, where these are installed.

Neither is a dependency of exp. Nothing is downloaded: networks begin with random weights, and published ones come from
``init_from``, by the library's own names.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, Sequence

import torch
from torch import nn

from exp.errors import ConfigError, UnavailableError, first_line, nearest, typed_line
from exp.models.base import best_prefix, most_frequent_prefixes
from exp.runs.files import read_json
from exp.vision.backbones.base import Backbone, Features, Published, State
from exp.vision.backbones.keys import TimmConfig, TransformersConfig
from exp.vision.backbones.published import check_config, pixel_statistics

__all__ = ["External", "Timm", "Transformers"]

_SIDE = 224  # of the image by which a network is measured: a multiple of 32, and of the patches of 14 pixels

_UNSEEN = {"model_type", "hidden_act", "layer_norm_eps", "num_attention_heads", "num_heads", "window_size"}
"""Keys of transformers whose values neither names nor shapes of tensors show, and which change what is computed."""


class External(Backbone):
    """A network that returns all its maps at once. Channels, strides and the order of its modules are measured.

    Attributes:
        network: the library's module.
        settings: what names and shapes of weights do not show, by the keys of the library's ``config.json``.

    Args:
        in_channels: of the image.
        network: takes images (B, C, H, W).
        out_indices: levels that the head gets; None: as many as it needs.
        side: height and width of an image that the network takes.
    """

    def __init__(
        self, in_channels: int, network: nn.Module, out_indices: Sequence[int] | None = None, side: int = _SIDE
    ) -> None:
        super().__init__(in_channels, out_indices)
        self.network = network
        self.settings: dict[str, Any] = {}
        self.network.eval()
        with torch.enable_grad():
            maps = self.maps(torch.zeros(1, in_channels, side, side))
        self.network.train()
        self.level_channels = [values.shape[1] for values in maps]
        self.level_strides = [side // values.shape[2] for values in maps]
        self._stages: list[list[str]] = [[] for _ in maps]
        levels = _first_levels(maps)
        for parameter in self.network.parameters():
            if id(parameter) not in levels:  # no map depends on it
                parameter.requires_grad_(False)
        self._sort_modules("network", self.network, levels)
        self.select_levels(None)

    def maps(self, image: torch.Tensor) -> list[torch.Tensor]:
        """Maps (B, C_i, h_i, w_i) of all levels."""
        raise NotImplementedError

    def forward(self, image: torch.Tensor, out_indices: Sequence[int] | None = None) -> Features:
        """See :meth:`exp.vision.backbones.base.Backbone.forward`; all levels are computed."""
        maps = self.maps(self.pad(image))
        return Features([maps[level].float() for level in self.requested_levels(out_indices)])

    def stages(self) -> list[list[nn.Module]]:
        """For each level the modules that it is the first to need; no module contains another."""
        return [[self.get_submodule(name) for name in names] for names in self._stages]

    def adapt_state_dict(self, state: State, source: Path) -> Published | None:
        """Read weights by the library's names, under any prefix. timm changes dots of names to underscores."""
        check_config(source, self.settings, "that of model.backbone")
        names = {_plain(name): f"network.{name}" for name in self.network.state_dict()}
        prefixes = most_frequent_prefixes(state, lambda name: _plain(name) in names)
        if not prefixes:
            return None
        prefix = best_prefix(prefixes)
        weights: dict[str, torch.Tensor] = {}
        others: dict[str, torch.Tensor] = {}
        for key, value in state.items():
            name = names.get(_plain(key[len(prefix) :])) if key.startswith(prefix) else None
            (others if name is None else weights)[name or key] = value
        return Published(weights, others, pixel_statistics(source) or self.statistics())

    def statistics(self) -> tuple[list[float], list[float]] | None:
        """Mean and standard deviation, 0..255, of the network's published weights, if the library says them."""
        return None

    def _sort_modules(self, name: str, module: nn.Module, levels: dict[int, int]) -> None:
        needed = {levels[id(parameter)] for parameter in module.parameters() if id(parameter) in levels}
        if len(needed) == 1:
            self._stages[needed.pop()].append(name)
        elif needed:
            for child_name, child in module.named_children():
                self._sort_modules(f"{name}.{child_name}", child, levels)


def _plain(name: str) -> str:
    return name[name.startswith("model.") and len("model.") :].replace(".", "_")


def _first_levels(maps: Sequence[torch.Tensor]) -> dict[int, int]:
    """For the id of each parameter that a map depends on: the first such map. Walks autograd's graph."""
    levels: dict[int, int] = {}
    seen: set[Any] = {None}
    for level, values in enumerate(maps):
        nodes = [values.grad_fn]
        while nodes:
            node: Any = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                levels[id(node.variable)] = level
            nodes += [before for before, _ in node.next_functions]
    return levels


def _library(name: str) -> Any:
    """Import a library.

    Raises:
        UnavailableError: it is not installed, does not load, or is too new for this Python.
    """
    if sys.version_info < (3, 9):
        raise UnavailableError(
            f"model.backbone: {name} is supported from Python 3.9 on, and this is 3.{sys.version_info[1]}; take a "
            "backbone of exp"
        )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UnavailableError(f"model.backbone needs the package {name} ({error}): pip install {name}") from error
    except Exception as error:
        raise UnavailableError(f"model.backbone: the package {name} does not load ({typed_line(error)})") from error


class Timm(External):
    """A network of timm, by ``timm.create_model(features_only=True)``.

    Args:
        in_channels: of the image.
        **keys: of :class:`exp.vision.backbones.keys.TimmConfig`.

    Raises:
        ConfigError: timm has no such network, or it gives no maps.
        UnavailableError: timm is not installed.
    """

    def __init__(self, in_channels: int = 3, **keys: Any) -> None:
        config, timm = TimmConfig(**keys), _library("timm")
        if not timm.is_model(config.name):
            raise ConfigError(
                f"model.backbone.name={config.name} is no network of timm{nearest(config.name, timm.list_models())}"
            )
        try:
            network = timm.create_model(
                config.name, pretrained=False, features_only=True, in_chans=in_channels, **config.options
            )
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"model.backbone: timm.create_model({config.name}): {first_line(error)}") from error
        self._published: Any = network.pretrained_cfg or {}
        side = self._published.get("input_size", [0])[-1] if self._published.get("fixed_input_size") else _SIDE
        self._channels_last = "NHWC" in str(getattr(network, "output_fmt", ""))
        super().__init__(in_channels, network, config.out_indices, config.options.get("img_size", side))
        self.settings = {"architecture": config.name.partition(".")[0]}

    def maps(self, image: torch.Tensor) -> list[torch.Tensor]:
        """Maps (B, C_i, h_i, w_i) of all levels."""
        maps = self.network(image)
        return [values.permute(0, 3, 1, 2) for values in maps] if self._channels_last else list(maps)

    def statistics(self) -> tuple[list[float], list[float]] | None:
        """Mean and standard deviation, 0..255, of timm's weights."""
        if "mean" not in self._published or "std" not in self._published:
            return None
        mean, std = ([255.0 * value for value in self._published[name]] for name in ("mean", "std"))
        return mean, std


class Transformers(External):
    """A network of transformers, by ``AutoBackbone``. The maps are those of all its stages except the stem.

    Args:
        in_channels: of the image.
        **keys: of :class:`exp.vision.backbones.keys.TransformersConfig`.

    Raises:
        ConfigError: transformers has no such network.
        UnavailableError: transformers is not installed.
    """

    def __init__(self, in_channels: int = 3, **keys: Any) -> None:
        config, transformers = TransformersConfig(**keys), _library("transformers")
        settings = {**_read_config(config.folder), **config.config, "num_channels": in_channels}
        name = settings.pop("model_type", None)
        try:
            theirs = transformers.AutoConfig.for_model(name, **settings)
            theirs.out_features = [stage for stage in theirs.stage_names if stage != "stem"]
            network = transformers.AutoBackbone.from_config(theirs)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"model.backbone: transformers has no backbone with model_type={name} and these keys: "
                f"{first_line(error)}"
            ) from error
        super().__init__(in_channels, network, config.out_indices)
        self.settings = {key: value for key, value in theirs.to_dict().items() if key in _UNSEEN}

    def maps(self, image: torch.Tensor) -> list[torch.Tensor]:
        """Maps (B, C_i, h_i, w_i) of all levels."""
        return list(self.network(image).feature_maps)


def _read_config(folder: str | None) -> dict[str, Any]:
    """The content of a folder's ``config.json``; empty without a folder."""
    config = read_json(Path(folder).expanduser() / "config.json") if folder else {}
    if not isinstance(config, dict):
        raise ConfigError(f"model.backbone.folder={folder} has no config.json that can be read")
    return config
