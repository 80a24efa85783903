"""Random numbers of augmentation: a function of (seed, epoch, sample) alone, not of who draws them, or when."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import Iterator

import numpy as np
import torch

__all__ = ["preserved_generators", "seed_sample"]


@contextmanager
def preserved_generators(with_torch: bool = False) -> Iterator[None]:
    """Leaves the global generators of Python, NumPy and, where asked, torch's of the CPU as they were."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    torchs = torch.get_rng_state() if with_torch else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torchs is not None:
            torch.set_rng_state(torchs)


def seed_sample(seed: int, epoch: int, number: int, with_torch: bool = False) -> None:
    """Seed the generators that transforms draw from.

    Args:
        seed: of the data.
        epoch: from 0.
        number: of the sample.
        with_torch: torch's, too.
    """
    mixed = np.random.SeedSequence((seed % 2**64, epoch, number)).generate_state(3)
    random.seed(int(mixed[0]))
    np.random.seed(mixed[1])
    if with_torch:
        torch.default_generator.manual_seed(int(mixed[2]))
