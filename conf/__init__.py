"""The Hydra configuration that comes with exp."""
