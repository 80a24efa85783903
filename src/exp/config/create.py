"""Makes the object that a config node names."""

from __future__ import annotations

from typing import Any

from hydra.utils import instantiate

__all__ = ["create"]


def create(config: Any, **arguments: Any) -> Any:
    """Hydra's ``instantiate``, but with the constructor's own errors.

    Hydra wraps what a constructor raises into an error of its own; the type, the exit code and the first line are lost
    with it. A partial leaves the call to us.

    Args:
        config: has ``_target_`` and arguments.
        **arguments: further ones.
    """
    return instantiate(config, _partial_=True, _convert_="all")(**arguments)
