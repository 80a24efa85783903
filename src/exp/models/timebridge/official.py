"""The authors' checkpoints: ``torch.save(model.state_dict())`` of github.com/Hank0626/TimeBridge."""

from __future__ import annotations

from typing import Mapping

import torch

from exp.errors import CheckpointError

__all__ = ["adapt_official_state_dict", "is_official_state_dict"]

_PREFIX = "module."
_LANDMARKS = ("embedding.proj.0.weight", "decoder.1.weight")


def is_official_state_dict(state: Mapping[str, torch.Tensor]) -> bool:
    """Whether ``state`` has the names of a TimeBridge, with or without DataParallel's prefix ``module.``."""
    return all(name in state or _PREFIX + name in state for name in _LANDMARKS)


def adapt_official_state_dict(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The authors' weights under our names, which are theirs without the prefix ``module.``.

    Args:
        state: tensors by name.

    Returns:
        The same tensors, by the names of :class:`exp.models.timebridge.TimeBridge`.

    Raises:
        CheckpointError: these are not the weights of a TimeBridge.
    """
    if not is_official_state_dict(state):
        missing = [name for name in _LANDMARKS if name not in state and _PREFIX + name not in state]
        raise CheckpointError(
            f"these are not the weights of a TimeBridge: {' and '.join(missing)} missing; check the file's path\n"
            f"names there: {', '.join(list(state)[:5])}"
        )
    return {name[len(_PREFIX) :] if name.startswith(_PREFIX) else name: value for name, value in state.items()}
