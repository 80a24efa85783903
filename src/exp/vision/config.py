"""The typed keys of image experiments: each with its type, its default and its unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from exp.plugins import Family, Plugin
from exp.vision import keys
from exp.vision.backbones import keys as backbone_keys
from exp.vision.data import keys as data_keys
from exp.vision.tasks import Features, Probe, Stats

__all__ = ["PredictKeys", "plugin"]

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class PredictKeys:
    """Keys of task=predict for images."""

    gsd: Optional[float] = None
    """Ground sampling distance of the images in meters per pixel; overrides that of the files. Images are read at the
    ground resolution of the training images. null: that of a GeoTIFF, for areas else ``data.gsd``."""
    mosaic: bool = False
    """Segmentation: predict the georeferenced files of ``task.input`` as one image; of overlapping files the last."""
    max_images: int = 16
    """Number of images on the contact sheet."""
    probabilities: bool = False
    """Segmentation: also write a raster with a band for the probability of each class."""
    confidence: bool = False
    """Segmentation: also write a raster of the margin, the difference of the two largest probabilities."""
    probability_dtype: str = "uint8"
    """Of these rasters: ``uint8`` (254: a probability of 1; 255: no data) or ``float16`` (NaN: no data)."""
    polygons: Optional[str] = None
    """Segmentation: also write the areas of each class as polygons, ``geojson`` or ``gpkg``, and the confidence."""
    min_area: float = 0.0
    """Smaller areas give no polygons: in square meters, or pixels where the size of a pixel is not known."""
    simplify: float = 0.0
    """Tolerance in pixels by which the borders of polygons are simplified, the same for neighbors; 0: not at all."""


_SMALL = (
    "model.backbone.size=tiny", "data.size=64", "global_batch_size=8", "schedule.warmup_steps=1", "data.num_workers=0",
)  # fmt: skip
plugin = Plugin(
    structures={
        "model/scenes": keys.SceneClassifierConfig,
        "model/encoder": keys.EncoderConfig,
        "model/segmentation": keys.SegmenterConfig,
        "model/regression": keys.RegressorConfig,
        "model/backbone/vit": keys.VisionTransformerConfig,
        "model/backbone/convnext": backbone_keys.ConvNextConfig,
        "model/backbone/mix_transformer": backbone_keys.MixTransformerConfig,
        "model/backbone/timm": backbone_keys.TimmConfig,
        "model/backbone/transformers": backbone_keys.TransformersConfig,
        "model/head/linear": keys.LinearConfig,
        "model/head/upsample": keys.UpsampleConfig,
        "model/head/fcn": keys.FcnConfig,
        "model/head/upernet": keys.UperNetConfig,
        "model/head/dpt": keys.DptConfig,
        "model/head/segformer": keys.SegformerConfig,
        "model/head/mask_transformer": keys.MaskTransformerConfig,
        "model/losses/cross_entropy": keys.CrossEntropyConfig,
        "model/losses/focal": keys.FocalConfig,
        "model/losses/dice": keys.DiceConfig,
        "model/losses/lovasz": keys.LovaszConfig,
        "model/losses/ohem": keys.OhemConfig,
        "model/losses/boundary": keys.BoundaryConfig,
        "model/losses/l1": keys.L1Config,
        "model/losses/huber": keys.HuberConfig,
        "model/losses/scale_invariant": keys.ScaleInvariantConfig,
        "model/distillation/labels": keys.LabelsConfig,
        "model/distillation/logits": keys.LogitsConfig,
        "model/distillation/features": keys.FeatureMapsConfig,
        "model/distillation/attention": keys.AttentionConfig,
        "data/distillation": data_keys.DistillationDataConfig,
        "data/scenes": data_keys.SceneDataConfig,
        "data/segmentation": data_keys.SegmentationDataConfig,
        "data/regression": data_keys.RegressionDataConfig,
        **{f"task/{task.name}": task for task in (Features, Probe, Stats)},
    },
    keys={"task/predict": PredictKeys},
    families={
        "scene classification": Family(keys.SceneClassifierConfig, data_keys.SceneDataConfig, "dinov3_eurosat", _SMALL),
        "segmentation": Family(keys.SegmenterConfig, data_keys.SegmentationDataConfig, "dinov3_dubai", _SMALL),
        "dense regression": Family(keys.RegressorConfig, data_keys.RegressionDataConfig, "dinov3_height", _SMALL),
    },
    outputs=("features", "features.csv", "predictions.csv", "probes.csv"),
)
