"""Hardware families, one file each; the only place that names vendors."""
