"""DINOv3 (Siméoni et al., arXiv 2508.10104): the vision transformer, and models for scenes and segmentation on it."""

from exp.models.dinov3.backbone import VisionTransformer
from exp.models.dinov3.classifier import SceneClassifier
from exp.models.dinov3.segmenter import Segmenter
from exp.models.dinov3.sizes import SIZES

__all__ = ["SIZES", "SceneClassifier", "Segmenter", "VisionTransformer"]
