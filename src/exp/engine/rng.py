"""Random states: seeded before anything is built, saved with every checkpoint, restored exactly."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Mapping

import numpy as np
import torch

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = ["device_state", "rng_state", "seed_everything", "set_rng_state"]


def seed_everything(seed: int, backend: Backend) -> None:
    """Seed Python, NumPy, torch's CPU generator and the device's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    seed_all = getattr(backend.module, "manual_seed_all", None) or getattr(backend.module, "manual_seed", None)
    if seed_all is not None:
        seed_all(seed)


def device_state(backend: Backend) -> torch.Tensor | None:
    """State of the device's random generator (uint8, on the CPU), or None where there is none of its own."""
    if not hasattr(backend.module, "get_rng_state"):
        return None
    state: torch.Tensor = backend.module.get_rng_state()
    return state.cpu()


def rng_state(backend: Backend) -> dict[str, Any]:
    """This process's random states, as plain data."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "device": device_state(backend),
        "python": [version, list(internal), gauss],
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def set_rng_state(state: Mapping[str, Any], backend: Backend) -> None:
    """Restore what :func:`rng_state` gave."""
    torch.set_rng_state(state["torch"])
    if state["device"] is not None:
        backend.module.set_rng_state(state["device"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
