"""A UNet that segments aerial images: a backbone and a head for exp's own data, windows and metrics."""
