"""A UNet that segments aerial images of Dubai."""
