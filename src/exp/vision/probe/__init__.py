"""Frozen features, kept once, and what is read from them without training a backbone: neighbours and linear probes."""
