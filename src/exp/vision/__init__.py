"""Images: scene classification, segmentation, distillation, large rasters, feature maps.

A plugin that comes with exp: it uses the public interfaces only.
"""
