"""DINOv3 (Siméoni et al., arXiv 2508.10104): the vision transformer, and models for scenes and segmentation on it."""
