"""The typed keys of model and data, for exp's command line. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List

from exp.plugins import Plugin
from exp.vision.data.keys import DistillationDataConfig
from exp.vision.keys import ImageModelConfig


@dataclass
class SelfSupervisedConfig(ImageModelConfig):
    """Keys of :class:`self_supervision.model.SelfSupervised`."""

    _target_: str = "self_supervision.model.SelfSupervised"
    prototypes: int = 4096
    """Outputs of each head: soft clusters to which teacher and student assign an image or a patch."""
    hidden: int = 2048
    """Elements of the hidden layers of a head."""
    bottleneck: int = 256
    """Elements before the prototypes, of length 1."""
    student_temperature: float = 0.1
    """Divides the student's scores."""
    teacher_temperature: float = 0.07
    """Divides the teacher's scores; the lower, the sharper its assignments."""
    momentum: float = 0.992
    """Share of the teacher's weights that remains in the first step; it grows to 1 along half a cosine."""
    dino_weight: float = 1.0
    """Factor of the loss of images: student and teacher see other views of one."""
    ibot_weight: float = 1.0
    """Factor of the loss of masked patches."""
    koleo_weight: float = 0.1
    """Factor of the loss that spreads the images of a group."""
    koleo_group: int = 16
    """Samples of a group; divides the samples of each rank and micro-batch, so that losses do not depend on ranks."""
    gram_weight: float = 0.0
    """Factor of Gram anchoring: similarities between patches stay those of the first weights; 0: off."""


@dataclass
class ViewDataConfig(DistillationDataConfig):
    """Keys of :class:`self_supervision.data.ViewData`. ``train_pipeline`` should draw no random numbers."""

    _target_: str = "self_supervision.data.ViewData"
    patch_size: int = 16
    """Side of a masked cell in pixels: that of the backbone's patches."""
    global_size: int = 224
    """Side of the two global views in pixels."""
    global_area: List[float] = field(default_factory=lambda: [0.32, 1.0])
    """Smallest and largest share of the image in a global view."""
    local_size: int = 96
    """Side of the local views in pixels."""
    local_area: List[float] = field(default_factory=lambda: [0.05, 0.32])
    """Likewise, of a local view."""
    local_views: int = 8
    """Number of local views."""
    mask_ratio: float = 0.3
    """Share of the patches of the first global view that are masked for the student."""
    jitter: float = 0.4
    """Largest change of brightness, contrast and saturation, as a share."""


plugin = Plugin(
    structures={"model/self_supervised": SelfSupervisedConfig, "data/views": ViewDataConfig},
    config="self_supervision.conf",
)
