"""DINOv3 (Siméoni et al., arXiv 2508.10104): the vision transformer, and models for scenes and segmentation on it."""

from exp.vision.dinov3.backbone import SIZES, VisionTransformer
from exp.vision.dinov3.models import Distiller, SceneClassifier, Segmenter

__all__ = ["SIZES", "Distiller", "SceneClassifier", "Segmenter", "VisionTransformer"]
