"""What the models on a DINOv3 backbone share: building it, normalising images, reading published weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Mapping, Sequence

import torch

from exp.config.explain import nearest
from exp.errors import CheckpointError, ConfigError
from exp.models.base import Model
from exp.models.dinov3.backbone import Features, VisionTransformer
from exp.models.dinov3.sizes import SIZES
from exp.models.dinov3.weights import adapt_published, check_size, is_published, pretraining_of

__all__ = ["ImageModel"]

# Mean and standard deviation of the pretraining images, RGB in 0..1 (the paper's; web: ImageNet's).
_NORMALIZATION = {
    "web": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "satellite": ((0.430, 0.411, 0.296), (0.213, 0.156, 0.143)),
}
_PREFIX = "backbone."


class ImageModel(Model):
    """A model on a :class:`VisionTransformer`, which takes images as the data set gives them.

    Args:
        size: one of :data:`exp.models.dinov3.sizes.SIZES`.
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

    Raises:
        ConfigError: the settings do not go together.
    """

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
    ) -> None:
        super().__init__()
        if size not in SIZES:
            raise ConfigError(f"model.size={size} is not one of {', '.join(SIZES)}{nearest(size, SIZES)}")
        if normalization != "auto" and normalization not in _NORMALIZATION:
            raise ConfigError(f"model.normalization={normalization} is not one of auto, {', '.join(_NORMALIZATION)}")
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
        self.backbone = VisionTransformer(
            self.size, patch_size, in_channels, layer_scale, drop_path, freeze, activation_checkpointing, rope_rescale
        )
        count = self.size.depth
        self.blocks = [count - 1] if blocks is None else [block % count if block < 0 else block for block in blocks]
        if not self.blocks or max(self.blocks) >= count or min(self.blocks) < 0:
            raise ConfigError(f"model.blocks={blocks} must name at least one block from 0 to {count - 1}")
        self._normalise_like("web" if normalization == "auto" else normalization)

    def _normalise_like(self, images: str) -> None:
        mean, std = (torch.tensor(values) * 255.0 for values in _NORMALIZATION[images])
        channels = self.backbone.patch_embed.proj.in_channels
        if channels != 3:  # which of them is red is not known
            mean, std = mean.mean().expand(channels), std.mean().expand(channels)
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

    def layer_of(self, name: str) -> int | None:
        """The backbone layer of a parameter (:meth:`VisionTransformer.layer_of`); None: it is the head's."""
        return self.backbone.layer_of(name[len(_PREFIX) :]) if name.startswith(_PREFIX) else None

    def may_start_anew(self, name: str) -> bool:
        """Whatever is not the backbone's."""
        return not name.startswith(_PREFIX)

    @property
    def num_layers(self) -> int:
        """Layers of the backbone as :meth:`layer_of` counts them."""
        return self.size.depth + 2

    def adapt_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """Published DINOv3 weights, or our own, for this model; normalisation follows the weights.

        Args:
            state: tensors by name.
            source: the file that they come from.

        Raises:
            CheckpointError: they are of another size or patch size.
        """
        if not is_published(state):
            own = dict(state)
            if self.normalization != "auto":
                own.update(pixel_mean=self.pixel_mean, pixel_std=self.pixel_std)
            backbone = {key[len(_PREFIX) :]: value for key, value in own.items() if key.startswith(_PREFIX)}
            check_size(backbone, self.size, source)
            return own
        adapted = adapt_published(state)
        check_size(adapted, self.size, source)
        name = "patch_embed.proj.weight"
        adapted[name] = self._fit_channels(adapted[name], source)
        pretraining = pretraining_of(state, source)
        if self.normalization == "auto" and pretraining is not None:
            self._normalise_like(pretraining)
        own = {_PREFIX + key: value for key, value in adapted.items()}
        return {**own, "pixel_mean": self.pixel_mean, "pixel_std": self.pixel_std}

    def _fit_channels(self, weight: torch.Tensor, source: Path) -> torch.Tensor:
        """The patch embedding for this model's channels: a grey image keeps its embedding however many there are."""
        wanted = self.backbone.patch_embed.proj.weight.shape
        if weight.shape[2:] != wanted[2:]:
            raise CheckpointError(
                f"init_from: {source} has patches of {weight.shape[2]} pixels, the model of {wanted[2]}; "
                f"set model.patch_size={weight.shape[2]}"
            )
        if weight.shape[1] == wanted[1]:
            return weight
        return (weight.sum(dim=1, keepdim=True) / wanted[1]).expand(-1, wanted[1], -1, -1).clone()
