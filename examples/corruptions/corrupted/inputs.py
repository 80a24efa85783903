"""Corruptions of any tensor. Random numbers depend on seed and sample alone, not on batch, rank or device."""

from __future__ import annotations

import torch

__all__ = ["corrupt"]


def corrupt(values: torch.Tensor, kind: str, amount: float, seed: int, numbers: torch.Tensor) -> torch.Tensor:
    """Corrupt each sample of a batch.

    Args:
        values: (B, ...), any dtype; integers are rounded and stay within their range.
        kind: a key of :data:`corrupted.task.AMOUNTS`.
        amount: in the unit given there.
        seed: of the random numbers, which are the same for all amounts of a kind.
        numbers: of the samples in their data set, (B,).

    Returns:
        The shape and dtype of ``values``.
    """
    samples = []
    for sample, number in zip(values.float(), numbers.tolist()):
        generator = torch.Generator().manual_seed(seed * 2**32 + number)
        mean = sample.mean()
        if kind == "noise":
            drawn = torch.randn(sample.shape, generator=generator).to(sample.device)
            samples.append(sample + amount * sample.std() * drawn)
            continue
        if kind == "missing":
            lost = torch.rand(sample.shape, generator=generator) < amount
        else:
            axis = max(range(sample.dim()), key=lambda axis: sample.shape[axis])
            size = sample.shape[axis]
            length = round(amount * size)
            start = int(torch.rand((), generator=generator) * (size - length + 1))
            lost = torch.zeros(sample.shape, dtype=torch.bool)
            lost.narrow(axis, start, length).fill_(True)
        samples.append(torch.where(lost.to(sample.device), mean, sample))
    changed = torch.stack(samples)
    if not values.is_floating_point():
        limits = torch.iinfo(values.dtype)
        changed = changed.round().clamp(limits.min, limits.max)
    return changed.to(values.dtype)
