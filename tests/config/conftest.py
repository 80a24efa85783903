from __future__ import annotations

from hydra import compose, initialize_config_module

from exp.config.sources import register


def composed(*overrides: str, folders=()):
    """The configuration that these words of a command line give, with the user's folders of configurations."""
    register(folders)
    with initialize_config_module("exp.conf", version_base="1.3"):
        return compose("config", list(overrides))
