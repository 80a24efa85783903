"""Whether weights are finite: asked on the device, and read once for all of them."""

from __future__ import annotations

import math
from typing import Any, Container, Mapping

import torch

__all__ = ["not_finite"]


def not_finite(state: Mapping[str, Any], parameters: Container[str]) -> list[str]:
    """Names of the tensors in a state dict that hold what no sound training leaves there.

    For parameters that is NaN or infinity (or a norm beyond float32); a buffer may hold infinity, as masks of attention
    do, but not NaN. The device is waited for once.

    Args:
        state: tensors by name, all on one device.
        parameters: names of those that are parameters.
    """
    names, verdicts = [], []
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            value = value.detach()
            verdict = value.norm(dtype=torch.float32) if name in parameters else value.ne(value).any().float()
            names.append((name, name in parameters))
            verdicts.append(verdict.reshape(()))
    if not verdicts:
        return []
    values = torch.stack(verdicts).cpu().tolist()
    return [name for (name, norm), value in zip(names, values) if (not math.isfinite(value) if norm else value)]
