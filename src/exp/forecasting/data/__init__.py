"""Series on disk, cut into windows."""
