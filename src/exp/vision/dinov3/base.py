"""What the models on a DINOv3 backbone share: building it, normalising images, reading published weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch
from torch import nn

from exp.config.explain import nearest
from exp.errors import ConfigError
from exp.models.base import Model
from exp.models.names import under_own_names
from exp.vision.dinov3.backbone import Features, VisionTransformer
from exp.vision.dinov3.bands import check_band_init, embedded, statistics_for
from exp.vision.dinov3.blocks import rope_periods
from exp.vision.dinov3.huggingface import beside
from exp.vision.dinov3.lora import is_of_lora, lora_settings, merged, settings_in
from exp.vision.dinov3.sizes import SIZES
from exp.vision.dinov3.weights import (
    adapt_published,
    backbone_settings,
    check_backbone,
    is_of_head,
    pretraining_of,
    published_prefix,
    refuse_other_families,
    refuse_unclaimed,
    with_periods,
)

__all__ = ["ImageModel"]

# Mean and standard deviation of the pretraining images, RGB in 0..1 (the paper's; web: ImageNet's).
_NORMALIZATION = {
    "web": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "satellite": ((0.430, 0.411, 0.296), (0.213, 0.156, 0.143)),
}
_PREFIX = "backbone."
_EMBEDDING = f"{_PREFIX}patch_embed.proj.weight"


class ImageModel(Model):
    """A model on a :class:`VisionTransformer`, which takes images as the data set gives them.

    Args:
        size: one of :data:`exp.vision.dinov3.sizes.SIZES`.
        patch_size: pixels along each side of a patch.
        in_channels: of the image (C).
        embed_dim: instead of the size's; the feed-forward part keeps its ratio.
        depth: instead of the size's.
        num_heads: instead of the size's.
        normalization: ``web``, ``satellite``, or ``auto``: as the weights of ``init_from`` want it, else ``web``.
        blocks: the blocks whose features the head sees, from 0, side by side; None: the last.
        layer_scale: see :class:`VisionTransformer`.
        drop_path: see there.
        freeze: see there.
        activation_checkpointing: see there.
        rope_rescale: see there.
        band_init: how the patch embedding of other weights begins for these bands (:mod:`exp.vision.dinov3.bands`).
        band_names: of the data's bands; None: not known.
        pixel_mean: of each band, 0..255, as the data say; None: as ``normalization`` says.
        pixel_std: likewise.
        lora: the keys of :class:`exp.vision.dinov3.lora.LoraSettings`; None: no low-rank updates.

    Raises:
        ConfigError: the settings do not go together.
    """

    changed_by_optimizer_alone = True
    pixel_mean: torch.Tensor
    pixel_std: torch.Tensor

    def __init__(
        self,
        size: str = "vits16",
        patch_size: int = 16,
        in_channels: int = 3,
        embed_dim: int | None = None,
        depth: int | None = None,
        num_heads: int | None = None,
        normalization: str = "auto",
        blocks: Sequence[int] | None = None,
        layer_scale: float = 1e-5,
        drop_path: float = 0.0,
        freeze: str | int = "none",
        activation_checkpointing: bool = False,
        rope_rescale: float | None = None,
        band_init: str = "auto",
        band_names: Sequence[str] | None = None,
        pixel_mean: Sequence[float] | None = None,
        pixel_std: Sequence[float] | None = None,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.band_init, self.band_names = band_init, list(band_names or ())
        check_band_init(band_init, self.band_names, in_channels)
        if size not in SIZES:
            raise ConfigError(f"model.size={size} is not one of {', '.join(SIZES)}{nearest(size, SIZES)}")
        if normalization != "auto" and normalization not in _NORMALIZATION:
            raise ConfigError(f"model.normalization={normalization} is not one of auto, {', '.join(_NORMALIZATION)}")
        for name, value in (("embed_dim", embed_dim), ("depth", depth), ("num_heads", num_heads)):
            if value is not None and value < 1:
                raise ConfigError(f"model.{name}={value} must be at least 1, or null for that of model.size")
        published = SIZES[size]
        dim = embed_dim or published.embed_dim
        self.size = dataclasses.replace(
            published,
            embed_dim=dim,
            depth=depth or published.depth,
            num_heads=num_heads or published.num_heads,
            hidden_dim=published.hidden_dim * dim // published.embed_dim,
        )
        self.normalization = normalization
        self._merged_from: dict[str, Any] | None = None  # settings of updates in a file that are not this model's
        self.backbone = VisionTransformer(
            self.size, patch_size, in_channels, layer_scale, drop_path, freeze, activation_checkpointing, rope_rescale,
            lora_settings(lora),
        )  # fmt: skip
        count = self.size.depth
        self.blocks = [count - 1] if blocks is None else [block % count if block < 0 else block for block in blocks]
        if not self.blocks or max(self.blocks) >= count or min(self.blocks) < 0:
            raise ConfigError(f"model.blocks={blocks} must name at least one block from 0 to {count - 1}")
        if pixel_mean is not None and normalization != "auto":
            raise ConfigError(
                f"model.normalization={normalization} and data.mean both say what is taken off the values; set one"
            )
        self._given = None if pixel_mean is None or pixel_std is None else (list(pixel_mean), list(pixel_std))
        self._normalise_like("web" if normalization == "auto" else normalization)

    def _normalise_like(self, images: str) -> None:
        channels = self.backbone.patch_embed.proj.in_channels
        if self._given is not None:
            mean, std = (torch.tensor(values) for values in self._given)
        else:
            mean, std = (
                statistics_for(torch.tensor(values) * 255.0, channels, self.band_names)
                for values in _NORMALIZATION[images]
            )
        self.register_buffer("pixel_mean", mean.reshape(1, -1, 1, 1).clone())
        self.register_buffer("pixel_std", std.reshape(1, -1, 1, 1).clone())

    def _use_blocks(self, *more: int) -> None:
        """Call once the heads are known: later blocks get no gradient, which DDP must not wait for."""
        for block in self.backbone.blocks[max([*self.blocks, *more]) + 1 :]:
            for parameter in block.parameters():
                parameter.requires_grad_(False)

    def features(self, image: torch.Tensor, blocks: Sequence[int] | None = None) -> list[Features]:
        """Features of raw images.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            blocks: which blocks', from 0; None: the last.

        Returns:
            One :class:`Features` for each block.
        """
        return self.backbone((image.float() - self.pixel_mean) / self.pixel_std, blocks)

    def sharded_units(self) -> list[nn.Module]:
        """The backbone's blocks (``wrapper=fsdp``); the head computes in float32, and is small."""
        return list(self.backbone.blocks)

    def layer_of(self, name: str) -> int | None:
        """The backbone layer of a parameter (:meth:`VisionTransformer.layer_of`); None: it is the head's."""
        return self.backbone.layer_of(name[len(_PREFIX) :]) if name.startswith(_PREFIX) else None

    def may_start_anew(self, name: str) -> bool:
        """Whatever is not the backbone's, and its low-rank updates, which begin as zero."""
        return not name.startswith(_PREFIX) or is_of_lora(name)

    @property
    def num_layers(self) -> int:
        """Layers of the backbone as :meth:`layer_of` counts them."""
        return self.size.depth + 2

    def adapt_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """Published DINOv3 weights, or our own, for this model; normalisation follows the weights.

        Published ones may be a part of another model, such as ``teacher.backbone.``; of that model's heads none is
        taken for ours.

        Args:
            state: tensors by name.
            source: the file that they come from.

        Returns:
            The weights; the patch embedding for as many channels as they have.

        Raises:
            ConfigError: they are of another family, size or patch size.
        """
        names = self.state_dict()
        refuse_other_families(state, names, source)
        prefix = published_prefix(state)
        if prefix is None or (prefix.endswith(_PREFIX) and prefix[: -len(_PREFIX)] + "pixel_mean" in state):  # ours
            own, masked = under_own_names(state, names), True
            if self.normalization != "auto" or self._given is not None:
                own.update(pixel_mean=self.pixel_mean, pixel_std=self.pixel_std)
            if any(key.startswith(_PREFIX) for key in own):
                own.setdefault(f"{_PREFIX}rope.periods", rope_periods(self.backbone.rope.head_dim))
        else:
            own, masked = self._of_published(state, prefix, source), any(key.endswith("bias_mask") for key in state)
        backbone, mine = _backbone_of(own), self.backbone.state_dict()
        check_backbone(backbone, mine, source)
        left = {key: value for key, value in backbone.items() if not is_of_lora(key)}
        refuse_unclaimed(left, mine, source, masked)
        return self._with_own_updates(own)

    def _of_published(self, state: Mapping[str, torch.Tensor], prefix: str, source: Path) -> dict[str, torch.Tensor]:
        """Published weights by this model's names, with the architecture and the statistics that stand beside them."""
        names, about = self.state_dict(), beside(source)
        inner = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
        heads = {key for key in inner if not prefix and is_of_head(key)}
        rest = {key: value for key, value in state.items() if not key.startswith(prefix) or key in heads}
        inner = {key: value for key, value in inner.items() if key not in heads}
        adapted = with_periods(adapt_published(inner), about)
        if "rope.periods" not in adapted:
            self.taken_on_trust = ["num_heads"]
            adapted["rope.periods"] = rope_periods(self.backbone.rope.head_dim, about.rope_base)
        own = {f"{key} of the file" if key in names else key: value for key, value in rest.items()}
        own.update({_PREFIX + key: value for key, value in adapted.items()})
        channels = self.backbone.patch_embed.proj.in_channels
        pretraining = pretraining_of(inner, source)
        mean, std = self.pixel_mean, self.pixel_std
        if self.normalization == "auto" and self._given is None:
            if about.statistics is not None:
                mean, std = (self._of_bands(torch.tensor(values), about.ours) for values in about.statistics)
            elif pretraining is not None:
                self._normalise_like(pretraining)
                mean, std = self.pixel_mean, self.pixel_std
        own.update(pixel_mean=mean, pixel_std=std)
        if not about.ours and _EMBEDDING in own and own[_EMBEDDING].shape[1] == channels == 3:
            own[_EMBEDDING] = embedded(own[_EMBEDDING], 3, self.band_names, self.band_init, source)
        return own

    def _of_bands(self, values: torch.Tensor, ours: bool) -> torch.Tensor:
        if not ours and len(values) == 3:
            values = statistics_for(values, self.backbone.patch_embed.proj.in_channels, self.band_names)
        return values.reshape(1, -1, 1, 1).clone()

    def _with_own_updates(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights whose low-rank updates are such as this model has, or are merged."""
        theirs = {key: value for key, value in state.items() if is_of_lora(key)}
        mine = {key: value for key, value in self.state_dict().items() if is_of_lora(key)}
        same = theirs.keys() == mine.keys() and all(
            value.shape == mine[key].shape and (value.dim() > 0 or float(value) == float(mine[key]))
            for key, value in theirs.items()
        )
        if same:
            return state
        self._merged_from = settings_in(theirs) if theirs else None
        return merged(state)

    def fit_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """A patch embedding for this model's bands (:func:`exp.vision.dinov3.bands.embedded`)."""
        fitted = super().fit_state_dict(state, source)
        channels = self.backbone.patch_embed.proj.in_channels
        if _EMBEDDING in fitted and fitted[_EMBEDDING].shape[1] != channels:
            fitted[_EMBEDDING] = embedded(fitted[_EMBEDDING], channels, self.band_names, self.band_init, source)
        for statistic in ("pixel_mean", "pixel_std"):
            if statistic in fitted and fitted[statistic].shape[1] != channels:
                mean = fitted[statistic].mean(dim=1, keepdim=True)
                fitted[statistic] = mean.expand(-1, channels, -1, -1).clone()
        return fitted

    def settings_of(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Size, patch size, channels and low-rank updates; see :meth:`exp.models.base.Model.settings_of`."""
        updates = settings_in(state)
        if not updates["model.lora.rank"] and self._merged_from is not None:
            updates = self._merged_from  # what was in the file
        return {**backbone_settings(_backbone_of(state)), **updates}

    def _blocks_in(self, state: Mapping[str, torch.Tensor], width: float) -> dict[str, str]:
        """How many blocks a head sees whose input is so wide."""
        token = state.get(f"{_PREFIX}cls_token")
        return {} if token is None else {"model.blocks": f"<{width / token.shape[-1]:.0f} blocks>"}


def _backbone_of(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key[len(_PREFIX) :]: value for key, value in state.items() if key.startswith(_PREFIX)}
