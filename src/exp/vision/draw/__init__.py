"""Pictures of images, labels and features."""
