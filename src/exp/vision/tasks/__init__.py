"""Tasks of images alone."""
