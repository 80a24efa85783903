"""Base class of the models on a DINOv3 backbone: builds it, normalizes images, reads published weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Callable, ClassVar, Mapping, Sequence, TypeVar

import torch
from torch import nn

from exp.errors import ConfigError, nearest
from exp.models.base import Model, strip_prefix
from exp.vision.data.bands import color_positions
from exp.vision.dinov3 import weights
from exp.vision.dinov3.backbone import SIZES, Features, Size, VisionTransformer, is_lora, merge_lora, rope_periods
from exp.vision.dinov3.huggingface import write_backbone
from exp.vision.dinov3.keys import BackboneConfig, ImageModelConfig, LoraConfig

__all__ = ["ImageModel", "adapt_to_bands", "resolve_size", "typed_keys"]

# Mean and standard deviation of the pretraining images, RGB in 0..1 (the paper's; web: ImageNet's).
_NORMALIZATION = {
    "web": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "satellite": ((0.430, 0.411, 0.296), (0.213, 0.156, 0.143)),
}
_PREFIX = "backbone."
_EMBEDDING = f"{_PREFIX}patch_embed.proj.weight"
_STATISTICS = ("pixel_mean", "pixel_std")
_Config = TypeVar("_Config")


def adapt_to_bands(values: torch.Tensor, channels: int, names: Sequence[str]) -> torch.Tensor:
    """Convert values per band (kernels, means, deviations) to the bands of a model.

    Args:
        values: (n, c, ...); with c = 3 of red, green and blue.
        channels: number of the model's bands (C).
        names: of the model's bands; empty: not known.

    Returns:
        (n, C, ...). If c = 3 and ``names`` has red, green and blue: these three get their own values, all other bands
        the mean of the three. Otherwise the values are unchanged if c = C, else each band gets the mean.
    """
    positions = color_positions(names)
    by_name = values.shape[1] == 3 and None not in positions
    if not by_name and channels == values.shape[1]:
        return values
    adapted = values.mean(dim=1, keepdim=True).repeat(1, channels, *[1] * (values.dim() - 2))
    for color, position in enumerate(positions if by_name else ()):
        assert position is not None
        adapted[:, position] = values[:, color]
    return adapted


def typed_keys(kind: type[_Config], keys: Any) -> _Config:
    """Typed keys from a mapping; an instance of ``kind`` is returned unchanged, and None gives the defaults."""
    return keys if isinstance(keys, kind) else kind(**dict(keys or {}))


def resolve_size(keys: BackboneConfig, key: str = "model") -> Size:
    """The size of a backbone by its keys; another ``embed_dim`` scales the feed-forward layers in proportion.

    Raises:
        ConfigError: there is no such size.
    """
    if keys.size not in SIZES:
        raise ConfigError(f"{key}.size={keys.size} is not one of {', '.join(SIZES)}{nearest(keys.size, SIZES)}")
    default = SIZES[keys.size]
    values: dict[str, Any] = {"embed_dim": keys.embed_dim, "depth": keys.depth, "num_heads": keys.num_heads}
    changed = {name: value for name, value in values.items() if value is not None}
    hidden = default.hidden_dim * changed.get("embed_dim", default.embed_dim) // default.embed_dim
    return dataclasses.replace(default, **changed, hidden_dim=hidden)


class ImageModel(Model):
    """A model on a :class:`VisionTransformer`, which takes images as the data set returns them.

    Attributes:
        config_class: class of the typed keys of ``model``.
        config: the keys.
        out_indices: numbers of the blocks whose features the head gets.

    Args:
        in_channels: of the image (C).
        band_names: of the data's bands; None: not known.
        pixel_mean: mean of each band, 0..255, from the data; None: that of ``normalization``.
        pixel_std: standard deviation of each band, likewise.
        **keys: the keys of ``model``.

    Raises:
        ConfigError: keys are out of range or contradict each other.
    """

    config_class: ClassVar[type] = ImageModelConfig
    config: Any
    pixel_mean: torch.Tensor
    pixel_std: torch.Tensor

    def __init__(
        self,
        in_channels: int = 3,
        band_names: Sequence[str] | None = None,
        pixel_mean: Sequence[float] | None = None,
        pixel_std: Sequence[float] | None = None,
        **keys: Any,
    ) -> None:
        super().__init__()
        config = self.config_class(**keys)
        config.lora = typed_keys(LoraConfig, config.lora)
        self.config, self.band_names = config, list(band_names or ())
        if config.normalization not in ("auto", *_NORMALIZATION):
            raise ConfigError(
                f"model.normalization={config.normalization} is not one of auto, {', '.join(_NORMALIZATION)}"
            )
        if pixel_mean is not None and config.normalization != "auto":
            raise ConfigError(
                f"model.normalization={config.normalization} and data.mean both normalize the values; set one of them"
            )
        self.size = resolve_size(config)
        self.backbone = VisionTransformer(self.size, in_channels, config)
        self.in_channels = in_channels
        out_indices = [-1] if config.out_indices is None else config.out_indices
        self.out_indices = self._block_indices(out_indices, "out_indices")
        self._uses_weights_normalization = config.normalization == "auto" and pixel_mean is None
        if pixel_mean is None or pixel_std is None:
            self._set_normalization("web" if config.normalization == "auto" else config.normalization)
        else:
            self.register_buffer("pixel_mean", torch.tensor(list(pixel_mean)).view(1, -1, 1, 1))
            self.register_buffer("pixel_std", torch.tensor(list(pixel_std)).view(1, -1, 1, 1))

    def _block_indices(self, blocks: Sequence[int], key: str) -> list[int]:
        """Numbers of blocks, from 0; negative ones count from the end."""
        count = self.size.depth
        numbers = [block % count if -count <= block < 0 else block for block in blocks]
        if not numbers or not all(0 <= block < count for block in numbers):
            raise ConfigError(f"model.{key}={list(blocks)} must name at least one block from 0 to {count - 1}")
        return numbers

    def _set_normalization(self, images: str) -> None:
        for name, values in zip(_STATISTICS, _NORMALIZATION[images]):
            rgb = torch.tensor(values).view(1, 3, 1, 1) * 255.0
            self.register_buffer(name, adapt_to_bands(rgb, self.in_channels, self.band_names))

    @property
    def normalization(self) -> str:
        """The images of whose statistics ``pixel_mean`` and ``pixel_std`` are: ``web``, ``satellite``, or ``own``."""
        statistics = torch.stack([self.pixel_mean, self.pixel_std]).flatten(1).cpu()
        for name, values in _NORMALIZATION.items():
            expected = adapt_to_bands(torch.tensor(values) * 255.0, self.in_channels, self.band_names)
            if torch.allclose(statistics, expected, atol=0.01):
                return name
        return "own"

    def _freeze_unused_blocks(self, more: Sequence[int] = ()) -> None:
        """Freeze the blocks after the last one in use: they get no gradient, and DDP must not wait for one."""
        for block in self.backbone.blocks[max([*self.out_indices, *more]) + 1 :]:
            block.requires_grad_(False)

    def features(self, image: torch.Tensor, out_indices: Sequence[int] | None = None) -> list[Features]:
        """Features of raw images.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            out_indices: numbers of the blocks, from 0; None: the last.

        Returns:
            One :class:`Features` for each block.
        """
        return self.backbone((image.float() - self.pixel_mean) / self.pixel_std, out_indices)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the submodules in place: backbone, heads and losses. The arguments are those of ``torch.compile``.

        Not the whole call: the windows of a prediction would be compiled as one program, anew for each size of image.
        """
        for submodule in self.children():
            submodule.compile(*args, **kwargs)

    def merge_updates(self) -> None:
        """Add the low-rank updates to the weights of the backbone, and remove them; outputs stay the same."""
        self.backbone.merge_updates()

    def write_backbone(self, folder: Path, image: torch.Tensor, say: Callable[[str], None]) -> float:
        """Write the backbone for transformers (:func:`exp.vision.dinov3.huggingface.write_backbone`)."""
        return write_backbone(self, folder, image, say)

    def sharded_units(self) -> list[nn.Module]:
        """The backbone's blocks (``wrapper=fsdp``); the head computes in float32, and is small."""
        return list(self.backbone.blocks)

    def layer_of(self, name: str) -> int | None:
        """The backbone layer of a parameter (:meth:`VisionTransformer.layer_of`); None for the head's parameters."""
        return self.backbone.layer_of(name[len(_PREFIX) :]) if name.startswith(_PREFIX) else None

    def is_new_head(self, name: str) -> bool:
        """Whether weights may be missing in a checkpoint: those of heads, and low-rank updates."""
        return not name.startswith(_PREFIX) or is_lora(name)

    @property
    def num_layers(self) -> int:
        """Number of layers as :meth:`layer_of` counts them."""
        return self.size.depth + 2

    def adapt_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """Rename published DINOv3 weights, or our own, to the names of this model; normalization follows the weights.

        A published backbone may have a prefix such as ``teacher.backbone.``; the heads of that model are not used.
        Low-rank updates are merged unless this model has the same ones.

        Args:
            state: tensors by name.
            source: the file of the tensors.

        Returns:
            The weights; the patch embedding has the number of channels of the file.

        Raises:
            ConfigError: the weights are of another family, size or patch size.
        """
        weights.refuse_convnext(state, source)
        prefix = weights.published_prefix(state)
        if prefix is None or (prefix.endswith(_PREFIX) and f"{prefix[: -len(_PREFIX)]}pixel_mean" in state):  # ours
            adapted = strip_prefix(state, self.state_dict())
        else:
            adapted = self._from_published(state, prefix, source)
        if not self._uses_weights_normalization:
            adapted.update(pixel_mean=self.pixel_mean, pixel_std=self.pixel_std)
        backbone = {key[len(_PREFIX) :]: value for key, value in adapted.items() if key.startswith(_PREFIX)}
        model_state = self.backbone.state_dict()
        weights.check_backbone({key: value for key, value in backbone.items() if not is_lora(key)}, model_state, source)
        file_updates, model_updates = ({key: tensors[key] for key in tensors if is_lora(key)}
                                       for tensors in (backbone, model_state))  # fmt: skip
        has_same_updates = file_updates.keys() == model_updates.keys() and all(
            value.shape == model_updates[key].shape and (value.dim() > 0 or float(value) == float(model_updates[key]))
            for key, value in file_updates.items()
        )
        return adapted if has_same_updates else merge_lora(adapted)

    def _from_published(self, state: Mapping[str, torch.Tensor], prefix: str, source: Path) -> dict[str, torch.Tensor]:
        """Published weights by this model's names, with rotary periods and pixel statistics from the files beside."""
        names, sidecar = self.state_dict(), weights.read_sidecar_config(source)
        backbone = {key[len(prefix) :]: value for key, value in state.items()
                 if key.startswith(prefix) and (prefix or not weights.HEAD.match(key))}  # fmt: skip
        rest = {key: value for key, value in state.items()
                if not key.startswith(prefix) or key[len(prefix) :] not in backbone}  # fmt: skip
        tensors = {f"{key} of the file" if key in names else key: value for key, value in rest.items()}
        adapted = weights.with_periods(weights.adapt_published(backbone), sidecar)
        if "rope.periods" not in adapted:
            self.unverifiable_keys = ["num_heads"]
            adapted["rope.periods"] = rope_periods(self.backbone.rope.head_dim, sidecar.rope_base)
        tensors.update({_PREFIX + key: value for key, value in adapted.items()})
        pretraining = weights.pretraining_of(source)
        if self._uses_weights_normalization and sidecar.statistics is None and pretraining is not None:
            self._set_normalization(pretraining)
        tensors.update(pixel_mean=self.pixel_mean, pixel_std=self.pixel_std)
        if self._uses_weights_normalization and sidecar.statistics is not None:
            tensors.update({name: torch.tensor(values).view(1, -1, 1, 1)
                        for name, values in zip(_STATISTICS, sidecar.statistics)})  # fmt: skip
        for name in () if sidecar.from_exp else (_EMBEDDING, *_STATISTICS):  # the data's bands may have another order
            if name in tensors and tensors[name].shape[1] == 3 and (self.in_channels == 3 or name != _EMBEDDING):
                tensors[name] = adapt_to_bands(tensors[name], self.in_channels, self.band_names)
        return tensors

    def fit_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """Convert patch embedding and pixel statistics to this model's bands (:func:`adapt_to_bands`)."""
        fitted = super().fit_state_dict(state, source)
        for name in (_EMBEDDING, *_STATISTICS):
            if name in fitted and fitted[name].shape[1] != self.in_channels:
                # The sum of the kernels stays the same, so that a gray image keeps its embedding.
                factor = fitted[name].shape[1] / self.in_channels if name == _EMBEDDING else 1.0
                fitted[name] = adapt_to_bands(fitted[name], self.in_channels, self.band_names) * factor
        return fitted
