"""Corruptions of any tensor. What is random depends on seed and sample alone: on no batch, rank or device."""

from __future__ import annotations

import torch

__all__ = ["corrupt"]


def corrupt(values: torch.Tensor, kind: str, amount: float, seed: int, numbers: torch.Tensor) -> torch.Tensor:
    """A batch with each of its samples corrupted.

    Args:
        values: (B, ...), any type; integers are rounded and stay within their range.
        kind: of :data:`corrupted.task.AMOUNTS`.
        amount: how much, as it says there.
        seed: of what is drawn at random; a larger amount of a kind has the same draws.
        numbers: of the samples in their data set, (B,).
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
