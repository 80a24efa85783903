"""Images: DINOv3, scene classification, segmentation, large rasters, feature maps.

A plugin that comes with exp: it uses the public interfaces only.
"""
