"""The typed keys of ``model.backbone``: each with its type, its default and its unit.

Imports neither torch nor numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

__all__ = ["ConvNextConfig", "MixTransformerConfig", "TimmConfig", "TransformersConfig"]

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class _StagedConfig:
    """Keys of backbones of four stages, whose maps are 1/4, 1/8, 1/16 and 1/32 of the image."""

    out_indices: Optional[List[int]] = None
    """Stages whose maps the head gets, from 0 (-1: the last); null: as many as the head needs."""
    drop_path_rate: float = 0.0
    """Probability of skipping a residual branch in the last block; it grows linearly from 0 in the first block."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


@dataclass
class ConvNextConfig(_StagedConfig):
    """A ConvNeXt (arXiv 2201.03545), as DINOv3 distills it (:class:`exp.vision.backbones.convnext.ConvNext`)."""

    _target_: str = "exp.vision.backbones.convnext.ConvNext"
    size: str = "tiny"
    """``tiny``, ``small``, ``base``, ``large``, or ``atto``, which is not published by DINOv3: for quick runs."""
    layer_scale_init: float = 1e-6
    """Initial layer scale; from random weights, the paper's 1e-6 needs long training."""


@dataclass
class MixTransformerConfig(_StagedConfig):
    """SegFormer's encoder (arXiv 2105.15203; :class:`exp.vision.backbones.segformer.MixTransformer`)."""

    _target_: str = "exp.vision.backbones.segformer.MixTransformer"
    size: str = "b0"
    """``b0`` to ``b5``."""
    norm_eps: float = 1e-6
    """Added to the variance in all layer norms: mmsegmentation's value; transformers computes with 1e-5."""


@dataclass
class TimmConfig:
    """A network of timm, which must be installed (:class:`exp.vision.backbones.external.Timm`)."""

    _target_: str = "exp.vision.backbones.external.Timm"
    name: str = "resnet18"
    """Name of a model in timm; weights come from ``init_from``, nothing is downloaded."""
    options: Dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``timm.create_model``, such as {drop_path_rate: 0.1}."""
    out_indices: Optional[List[int]] = None
    """Levels whose maps the head gets, from 0 (-1: the last); null: as many as the head needs."""


@dataclass
class TransformersConfig:
    """A network of transformers, which must be installed (:class:`exp.vision.backbones.external.Transformers`)."""

    _target_: str = "exp.vision.backbones.external.Transformers"
    config: Dict[str, Any] = field(default_factory=dict)
    """What ``config.json`` has, at least ``model_type``, such as {model_type: swin, depths: [2, 2, 6, 2]}; for keys
    that are left out, the defaults of transformers. Nothing is downloaded."""
    folder: Optional[str] = None
    """Folder of a published model, for its ``config.json``; ``config`` overrides single keys."""
    out_indices: Optional[List[int]] = None
    """Levels whose maps the head gets, from 0 (-1: the last); null: as many as the head needs."""
