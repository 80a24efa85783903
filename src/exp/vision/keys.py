"""The typed keys of ``model`` for images: each with its type, its default and its unit.

Imports neither torch nor numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, List, Optional, Sequence

__all__ = [
    "AttentionConfig", "BoundaryConfig", "CrossEntropyConfig", "DiceConfig", "DptConfig", "EncoderConfig", "FcnConfig",
    "FeatureMapsConfig", "FocalConfig", "HeadConfig", "ImageModelConfig", "LabelsConfig", "LinearConfig",
    "LogitsConfig", "LoraConfig", "LossConfig", "LovaszConfig", "MaskTransformerConfig", "OhemConfig",
    "SceneClassifierConfig", "SegformerConfig", "SegmenterConfig", "TeacherConfig", "UperNetConfig", "UpsampleConfig",
    "VisionTransformerConfig",
]  # fmt: skip

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
    targets: List[str] = field(default_factory=lambda: ["all"])
    """Linear layers of the backbone with an update: ``all``, or the last parts of their names; for a vision transformer
    also ``attention`` (``q``, ``k``, ``v``, ``proj``) and ``mlp`` (``fc1``, ``fc2``; of gated sizes ``w1``, ``w2``,
    ``w3``)."""


@dataclass
class VisionTransformerConfig:
    """A vision transformer of DINOv3 (:class:`exp.vision.backbones.vit.VisionTransformer`)."""

    _target_: str = "exp.vision.backbones.vit.VisionTransformer"
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
    out_indices: Optional[List[int]] = None
    """Blocks whose features the head gets, from 0 (-1: the last); null: the last, or four for heads over four maps."""
    layer_scale_init: float = 1e-5
    """Initial layer scale; from random weights, the paper's 1e-5 needs long training."""
    drop_path_rate: float = 0.0
    """Probability of skipping a residual branch in the last block; it grows linearly from 0 in the first block."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


@dataclass
class LinearConfig:
    """A linear layer for each cell (:class:`exp.vision.heads.Linear`)."""

    _target_: str = "exp.vision.heads.Linear"
    dropout: float = 0.0
    """Probability of dropping a channel before the last layer."""


@dataclass
class HeadConfig(LinearConfig):
    """Keys that the convolutional heads share (:mod:`exp.vision.heads`)."""

    channels: int = 256
    """Channels of the head's own layers."""
    norm: str = "batch"
    """``batch`` (see ``wrapper.sync_batchnorm``) or ``group``."""


@dataclass
class MaskTransformerConfig(LinearConfig):
    """Class queries beside the patches of a frozen transformer (:class:`exp.vision.heads.MaskTransformer`)."""

    _target_: str = "exp.vision.heads.MaskTransformer"
    channels: int = 256
    """Elements of a token in the head; a multiple of ``num_heads``."""
    depth: int = 2
    """Transformer blocks of the head."""
    num_heads: int = 4
    """Attention heads."""
    upscale: int = 2
    """Doublings of the resolution of the patches."""


@dataclass
class UpsampleConfig(HeadConfig):
    """Two stages that double the resolution (:class:`exp.vision.heads.Upsample`)."""

    _target_: str = "exp.vision.heads.Upsample"


@dataclass
class FcnConfig(HeadConfig):
    """A convolution and a linear layer (:class:`exp.vision.heads.Fcn`)."""

    _target_: str = "exp.vision.heads.Fcn"


@dataclass
class UperNetConfig(HeadConfig):
    """UPerNet, over four maps (:class:`exp.vision.heads.UperNet`)."""

    _target_: str = "exp.vision.heads.UperNet"


@dataclass
class DptConfig(HeadConfig):
    """DPT, over four maps (:class:`exp.vision.heads.Dpt`)."""

    _target_: str = "exp.vision.heads.Dpt"


@dataclass
class SegformerConfig(HeadConfig):
    """SegFormer's head of linear layers, over four maps (:class:`exp.vision.heads.Segformer`)."""

    _target_: str = "exp.vision.heads.Segformer"


@dataclass
class LossConfig:
    """Keys that all losses share (:class:`exp.vision.losses.Loss`)."""

    _target_: str = "exp.vision.losses.Loss"
    weight: float = 1.0
    """Factor of the loss in the sum."""


@dataclass
class CrossEntropyConfig(LossConfig):
    """Cross-entropy (:class:`exp.vision.losses.CrossEntropy`)."""

    _target_: str = "exp.vision.losses.CrossEntropy"
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes (arXiv 1512.00567)."""


@dataclass
class FocalConfig(LossConfig):
    """Focal loss (:class:`exp.vision.losses.Focal`)."""

    _target_: str = "exp.vision.losses.Focal"
    gamma: float = 2.0
    """Focusing parameter: the larger, the less well-classified examples count; 0: cross-entropy."""


@dataclass
class OhemConfig(LossConfig):
    """Cross-entropy of the hardest pixels (:class:`exp.vision.losses.Ohem`)."""

    _target_: str = "exp.vision.losses.Ohem"
    share: float = 0.25
    """Share of the pixels of each image that count."""


@dataclass
class DiceConfig(LossConfig):
    """Dice loss (:class:`exp.vision.losses.Dice`)."""

    _target_: str = "exp.vision.losses.Dice"


@dataclass
class LovaszConfig(LossConfig):
    """Lovász-softmax (:class:`exp.vision.losses.Lovasz`)."""

    _target_: str = "exp.vision.losses.Lovasz"


@dataclass
class BoundaryConfig(LossConfig):
    """Cross-entropy beside borders of classes (:class:`exp.vision.losses.Boundary`)."""

    _target_: str = "exp.vision.losses.Boundary"


@dataclass
class TeacherConfig:
    """The network from which a student learns (:class:`exp.vision.teachers.Teacher`)."""

    init_from: Optional[str] = None
    """A run, whose network is the teacher, or published weights of ``backbone``; null: ``sample_data``."""
    sample_data: Optional[str] = None
    """A run among the sample data that come with exp."""
    store: Optional[str] = None
    """Instead of a network: the folder in which task=features has stored the teacher's features of these data."""
    backbone: Any = field(default_factory=dict)
    """With published weights: the teacher's backbone, ``model/backbone@model.teacher.backbone=<choice>``."""


@dataclass
class LabelsConfig:
    """The student's own losses (:class:`exp.vision.distillation.Labels`)."""

    _target_: str = "exp.vision.distillation.Labels"
    weight: float = 1.0
    """Factor of the term in the sum."""


@dataclass
class LogitsConfig(LabelsConfig):
    """Softened scores of the teacher (:class:`exp.vision.distillation.Logits`)."""

    _target_: str = "exp.vision.distillation.Logits"
    temperature: float = 4.0
    """Divides the scores of both; the higher, the more the teacher's smaller scores count."""


@dataclass
class AttentionConfig(LabelsConfig):
    """The teacher's attention (:class:`exp.vision.distillation.Attention`)."""

    _target_: str = "exp.vision.distillation.Attention"
    levels: List[List[int]] = field(default_factory=lambda: [[-1, -1]])
    """Pairs of a level of the student and one of the teacher, from 0 (-1: the last)."""


@dataclass
class FeatureMapsConfig(AttentionConfig):
    """The teacher's features (:class:`exp.vision.distillation.FeatureMaps`)."""

    _target_: str = "exp.vision.distillation.FeatureMaps"
    part: str = "patches"
    """``patches`` (every cell of a map), or ``cls``: the CLS token, without one the mean of the map."""
    cosine: float = 1.0
    """Factor of one minus the cosine of projected student and teacher."""
    mse: float = 0.0
    """Factor of their mean squared distance."""
    smooth_l1: float = 0.0
    """Factor of their smooth L1 distance."""
    dropout: float = 0.0
    """Dropout probability before the projection."""


def _cross_entropy() -> List[Any]:
    return [{"_target_": CrossEntropyConfig._target_, "weight": 1.0}]


@dataclass
class ImageModelConfig:
    """Keys of all models on a backbone (:class:`exp.vision.models.ImageModel`).

    The number of classes and of channels comes from the data.
    """

    paths: ClassVar[Sequence[str]] = ("teacher.init_from", "teacher.store")
    """Keys that are paths."""

    backbone: Any = field(default_factory=dict)
    """The backbone, ``model/backbone=<choice>``, or {_target_: <path of a class>, <its keys>}."""
    normalization: str = "auto"
    """Pixel statistics: ``web``, ``satellite``, or ``auto``: those of the weights in ``init_from``, else ``web``."""
    freeze: Any = "none"
    """``none``, ``all`` (linear probe), or the number of first blocks or stages that are not trained."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank updates, trained instead of the backbone's own weights."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The network from which the model learns; it is not trained, and not in checkpoints."""
    distillation: List[Any] = field(default_factory=list)
    """Terms of the loss, each {_target_: <path of a class>, weight: <its factor in the sum>, <its keys>}; those of
    :mod:`exp.vision.distillation` are Labels, Logits, FeatureMaps and Attention. Empty: no teacher."""


@dataclass
class LabelConfig(ImageModelConfig):
    """Keys of models that learn classes."""

    losses: List[Any] = field(default_factory=_cross_entropy)
    """Losses, each {_target_: <path of a class>, weight: <its factor in the sum>, <its keys>}; those of
    :mod:`exp.vision.losses` are CrossEntropy, Focal, Dice, Lovasz, Ohem and Boundary."""
    class_weights: Optional[List[float]] = None
    """One weight per class, in losses that are a mean over labels; null: all 1."""


@dataclass
class SceneClassifierConfig(LabelConfig):
    """Scene classification (:class:`exp.vision.models.SceneClassifier`)."""

    _target_: str = "exp.vision.models.SceneClassifier"
    dropout: float = 0.0
    """Dropout probability before the linear layer."""


@dataclass
class DenseConfig(ImageModelConfig):
    """Keys of models with outputs for each pixel (:class:`exp.vision.models.DenseModel`)."""

    head: Any = field(default_factory=dict)
    """The head, ``model/head=<choice>``, or {_target_: <path of a class>, <its keys>} (docs/guide/dinov3.md)."""
    inference: str = "slide"
    """``slide`` (overlapping windows) or ``whole`` images."""
    window: int = 512
    """Side of a window in pixels; best the size of training crops."""
    overlap: float = 0.25
    """Share of a window that the next window covers, too, from 0 to 1."""
    blend: Optional[str] = None
    """Weights of overlapping windows: ``hann`` (fading to nearly 0 at their borders, so that scores do not jump there),
    ``uniform``; null: ``uniform``."""
    tta_scales: List[float] = field(default_factory=lambda: [1.0])
    """Test-time augmentation: images are predicted at each of these scales."""
    tta_flip: bool = False
    """Test-time augmentation: images are also predicted mirrored."""


@dataclass
class SegmenterConfig(LabelConfig, DenseConfig):
    """Semantic segmentation (:class:`exp.vision.models.Segmenter`)."""

    _target_: str = "exp.vision.models.Segmenter"
    auxiliary_weight: float = 0.0
    """Weight of the loss of an auxiliary head on an inner level; 0: no such head."""
    auxiliary_out_index: Optional[int] = None
    """Level whose map the auxiliary head gets, from 0; null: at two thirds of the depth."""
    auxiliary_head: Any = field(default_factory=lambda: {"_target_": "exp.vision.heads.Fcn"})
    """The auxiliary head, with the keys of ``head``."""


@dataclass
class ValueLossConfig:
    """Keys that all losses of dense regression share (:class:`exp.vision.losses.ValueLoss`)."""

    _target_: str = "exp.vision.losses.ValueLoss"
    weight: float = 1.0
    """Factor of the loss in the sum."""


@dataclass
class L1Config(ValueLossConfig):
    """Absolute error (:class:`exp.vision.losses.L1`)."""

    _target_: str = "exp.vision.losses.L1"


@dataclass
class HuberConfig(ValueLossConfig):
    """Huber loss (:class:`exp.vision.losses.Huber`)."""

    _target_: str = "exp.vision.losses.Huber"
    delta: float = 1.0
    """Error from which it grows no faster, in the unit of the targets."""


@dataclass
class ScaleInvariantConfig(ValueLossConfig):
    """Scale-invariant error of logarithms (:class:`exp.vision.losses.ScaleInvariant`)."""

    _target_: str = "exp.vision.losses.ScaleInvariant"
    share: float = 0.5
    """How much of a common factor of all values of an image is forgiven, from 0 to 1."""
    offset: float = 1.0
    """Is added to values, in their unit, so that 0 has a logarithm."""


def _l1() -> List[Any]:
    return [{"_target_": L1Config._target_, "weight": 1.0}]


@dataclass
class RegressorConfig(DenseConfig):
    """Dense regression (:class:`exp.vision.models.Regressor`)."""

    _target_: str = "exp.vision.models.Regressor"
    losses: List[Any] = field(default_factory=_l1)
    """Losses, each {_target_: <path of a class>, weight: <its factor in the sum>, <its keys>}; those of
    :mod:`exp.vision.losses` are L1, Huber and ScaleInvariant."""


def _features_of_both() -> List[Any]:
    features = FeatureMapsConfig._target_
    patches = {"_target_": features, "weight": 1.0, "part": "patches", "cosine": 0.9, "smooth_l1": 0.1}
    return [{"_target_": features, "weight": 1.0, "part": "cls"}, patches]


@dataclass
class EncoderConfig(ImageModelConfig):
    """A backbone without a head, which learns features (:class:`exp.vision.models.Encoder`)."""

    _target_: str = "exp.vision.models.Encoder"
    distillation: List[Any] = field(default_factory=_features_of_both)
    """See :class:`ImageModelConfig`; by default the losses of AM-RADIO (Ranzinger et al., arXiv 2312.06709)."""
