"""Backbones: from images to feature maps. A file for each family of networks; :mod:`.base` has their interface."""
