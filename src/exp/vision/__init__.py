"""Images: DINOv3, scene classification, segmentation, large rasters, feature maps. A plug-in: it uses exp's public interfaces only."""
