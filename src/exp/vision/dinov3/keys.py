"""The typed keys of ``model`` for DINOv3: each with its type, its default and its unit.

Imports neither torch nor numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Optional

__all__ = ["BackboneConfig", "DistillerConfig", "ImageModelConfig", "LoraConfig", "LossConfig", "SceneClassifierConfig",
           "SegmenterConfig", "TeacherConfig"]  # fmt: skip

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class LoraConfig:
    """Low-rank updates of a frozen backbone (Hu et al., arXiv 2106.09685)."""

    rank: int = 0
    """Rank of the updates. Above 0 only the updates and the head are trained; 0: no updates."""
    alpha: float = 16.0
    """Updates are multiplied by alpha / rank."""
    dropout: float = 0.0
    """Probability of dropping an element of an update's input."""
    targets: List[str] = field(default_factory=lambda: ["attention", "mlp"])
    """Linear layers with an update: ``attention`` (``q``, ``k``, ``v``, ``proj``), ``mlp`` (``fc1``, ``fc2``; of gated
    sizes ``w1``, ``w2``, ``w3``), or single names of these."""


@dataclass
class BackboneConfig:
    """The size of a DINOv3 backbone (arXiv 2508.10104)."""

    size: str = "vits16"
    """``vits16``, ``vits16plus``, ``vitb16``, ``vitl16``, ``vitl16plus``, ``vith16plus``, ``vit7b16``, or ``tiny``."""
    patch_size: int = 16
    """Pixels along each side of a patch."""
    embed_dim: Optional[int] = None
    """Elements of a token; null: those of ``size``."""
    depth: Optional[int] = None
    """Number of blocks; null: that of ``size``."""
    num_heads: Optional[int] = None
    """Attention heads; null: those of ``size``."""


@dataclass
class ImageModelConfig(BackboneConfig):
    """Keys of all models on a DINOv3 backbone (:class:`exp.vision.dinov3.base.ImageModel`).

    The number of classes and of channels comes from the data.
    """

    normalization: str = "auto"
    """Pixel statistics: ``web``, ``satellite``, or ``auto``: those of the weights in ``init_from``, else ``web``."""
    out_indices: Optional[List[int]] = None
    """Blocks whose features the head gets, from 0 (-1: the last); null: the last, four for ``upernet`` and ``dpt``."""
    layer_scale_init: float = 1e-5
    """Initial layer scale; from random weights, the paper's 1e-5 needs long training."""
    drop_path_rate: float = 0.0
    """Probability of skipping a residual branch in the last block; it grows linearly from 0 in the first block."""
    freeze: Any = "none"
    """``none``, ``all`` (linear probe), or the number of first blocks that are not trained."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    dropout: float = 0.0
    """Dropout probability before the last layer of a head."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank updates, trained instead of the backbone's own weights."""


@dataclass
class LossConfig:
    """A sum of losses over classes (:class:`exp.vision.dinov3.losses.Losses`)."""

    class_weights: Optional[List[float]] = None
    """One weight per class in the cross-entropy and the focal loss; null: all 1."""
    cross_entropy_weight: float = 1.0
    """Weight of the cross-entropy in the sum of losses; 0: not used."""
    focal_weight: float = 0.0
    """Weight of the focal loss; 0: not used."""
    focal_gamma: float = 2.0
    """Focusing parameter of the focal loss: the larger, the less well-classified examples count; 0: cross-entropy."""


@dataclass
class SceneClassifierConfig(ImageModelConfig, LossConfig):
    """Scene classification (:class:`exp.vision.dinov3.models.SceneClassifier`)."""

    _target_: str = "exp.vision.dinov3.models.SceneClassifier"
    label_smoothing: float = 0.0
    """Share of the target that the cross-entropy spreads over all classes."""


@dataclass
class SegmenterConfig(ImageModelConfig, LossConfig):
    """Semantic segmentation (:class:`exp.vision.dinov3.models.Segmenter`)."""

    _target_: str = "exp.vision.dinov3.models.Segmenter"
    head: Any = "upsample"
    """``linear`` (one layer per patch), ``upsample`` (two convolutional stages, four times the resolution),
    ``upernet`` or ``dpt`` (both over four blocks), or {_target_: <path of a class>, <its keys>}
    (docs/guide/dinov3.md)."""
    head_channels: int = 256
    """Channels of the layers of the head (except ``linear``) and of the auxiliary head."""
    head_norm: str = "batch"
    """``batch`` (see ``wrapper.sync_batchnorm``) or ``group``."""
    auxiliary_weight: float = 0.0
    """Weight of the loss of an auxiliary head on an inner block; 0: no such head."""
    auxiliary_out_index: Optional[int] = None
    """Block whose features the auxiliary head gets, from 0; null: at two thirds of the depth."""
    dice_weight: float = 0.0
    """Weight of the Dice loss; 0: not used."""
    lovasz_weight: float = 0.0
    """Weight of the Lovász-softmax loss, a surrogate of the mean IoU of each image; 0: not used."""
    inference: str = "slide"
    """``slide`` (overlapping windows) or ``whole`` images."""
    window: int = 512
    """Side of a window in pixels; best the size of training crops."""
    overlap: float = 0.25
    """Share of a window that the next window covers, too, from 0 to 1."""
    tta_scales: List[float] = field(default_factory=lambda: [1.0])
    """Test-time augmentation: images are predicted at each of these scales."""
    tta_flip: bool = False
    """Test-time augmentation: images are also predicted mirrored."""


@dataclass
class TeacherConfig(BackboneConfig):
    """The backbone that a student learns from; if its patch size differs, its feature maps are interpolated."""

    size: str = "vitl16"
    init_from: Optional[str] = None
    """The teacher's weights: published ones, or a run. Must be set."""


@dataclass
class DistillerConfig(ImageModelConfig):
    """Knowledge distillation of features (:class:`exp.vision.dinov3.models.Distiller`)."""

    _target_: str = "exp.vision.dinov3.models.Distiller"
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The teacher; it is not trained, and not in checkpoints."""
    cls_token_weight: float = 1.0
    """Weight of the loss of the CLS token: one minus the cosine."""
    patch_weight: float = 1.0
    """Weight of the loss of the patches."""
    smooth_l1_ratio: float = 0.1
    """Share of the smooth L1 distance in the loss of the patches, from 0 to 1; the rest is one minus the cosine."""
