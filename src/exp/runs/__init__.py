"""What a run leaves: its folder, lock, record and signs of life."""
