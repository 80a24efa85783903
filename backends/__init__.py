"""Hardware families: one file each, and the only place that names a vendor."""
