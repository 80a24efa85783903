"""The typed keys of image experiments: each with its type, its default and its unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from exp.plugins import Family, Plugin
from exp.vision.data import keys as data_keys
from exp.vision.dinov3 import keys as dinov3_keys
from exp.vision.tasks import Export, Features, Probe, Stats

__all__ = ["PredictKeys", "plugin"]

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class PredictKeys:
    """Keys of task=predict for images."""

    gsd: Optional[float] = None
    """Ground sampling distance in meters per pixel, for areas; overrides that of the files. null: that of a GeoTIFF,
    else ``data.gsd``."""
    max_images: int = 16
    """Number of images on the contact sheet."""


_SMALL = ("model.size=tiny", "data.size=64", "global_batch_size=8", "schedule.warmup_steps=1", "data.num_workers=0")
plugin = Plugin(
    structures={
        "model/scenes": dinov3_keys.SceneClassifierConfig,
        "model/distillation": dinov3_keys.DistillerConfig,
        "data/distillation": data_keys.DistillationDataConfig,
        "model/segmentation": dinov3_keys.SegmenterConfig,
        "data/scenes": data_keys.SceneDataConfig,
        "data/segmentation": data_keys.SegmentationDataConfig,
        **{f"task/{task.name}": task for task in (Export, Features, Probe, Stats)},
    },
    keys={"task/predict": PredictKeys},
    families={
        "scene classification": Family(
            dinov3_keys.SceneClassifierConfig, data_keys.SceneDataConfig, "dinov3_eurosat", _SMALL
        ),
        "segmentation": Family(dinov3_keys.SegmenterConfig, data_keys.SegmentationDataConfig, "dinov3_dubai", _SMALL),
    },
    outputs=("features", "features.csv", "predictions.csv", "probes.csv"),
)
