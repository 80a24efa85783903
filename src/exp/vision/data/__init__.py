"""Image data: scenes with one label each, and images with a label for each pixel."""
