"""MobileNetV2, with weights that somebody has trained on ImageNet."""
