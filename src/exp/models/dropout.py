"""Dropout whose masks can be a function of (seed, step, layer, sample, position) alone.

With ``dropout_by_sample=true`` a training with dropout is the same on any number of devices of any kind, and goes on
the same at another number of them: masks come from no generator but from a hash of counters, in 32-bit integers that
every device computes alike. It takes some ten operators where torch's own dropout is one, and keeps attention from its
fused form; hence it is off by default, and then all of this module is torch's dropout.

A model takes part by :class:`Dropout` instead of ``nn.Dropout``, and :func:`sample_mask` for what it drops itself. A
module that draws otherwise says so by ``draws_by_itself = True``. One that is used several times in a pass has another
mask each time, by the order of its uses; where it is also computed anew in the backward pass, whose order is another,
uses are told apart by ``slot``.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from exp.errors import ConfigError

if TYPE_CHECKING:
    from exp.data.sampler import TrainBatchSampler

__all__ = ["Dropout", "Dropout2d", "DropoutStream", "draws_by_sample", "sample_mask"]

_active: DropoutStream | None = None


class DropoutStream:
    """Counts what the masks of a training are a function of.

    Args:
        model: bare; its modules get their names' numbers, by which their masks differ.
        sampler: of the training: says which samples of the global batch this rank has.
        seed: of the run.
    """

    def __init__(self, model: nn.Module, sampler: TrainBatchSampler, seed: int) -> None:
        self.sampler, self.seed = sampler, seed
        self.step = self.first = 0
        self._uses: Counter[tuple[int, int]] = Counter()  # by module and slot
        self._backward = False
        for name, module in model.named_modules():
            module.dropout_key = zlib.crc32(name.encode())
        drawing = ((name, module) for name, module in model.named_modules() if _draws_by_itself(module))
        self.left_out = [name or type(module).__name__ for name, module in drawing]
        """Names of the modules that draw from the device's generator all the same."""

    def begin(self, step: int, micro_batch: int) -> None:
        """A micro-batch begins; until :meth:`end` masks are those of its samples.

        Args:
            step: optimizer steps completed.
            micro_batch: its number within the step.
        """
        global _active
        sampler = self.sampler
        self.step = step
        # Of the samples of a step, in the order of the permutation: the same at any number of ranks.
        self.first = (micro_batch * sampler.world_size + sampler.rank) * sampler.batch_size
        self._uses.clear()
        self._backward = False
        _active = self

    def begin_backward(self) -> None:
        """The forward pass is over: what is drawn from here on was drawn in it."""
        self._backward = True

    def use_of(self, module: nn.Module, slot: int) -> int:
        """How many masks the module has had in this forward pass, for the slot.

        Raises:
            ConfigError: it had several, and the backward pass asks for one of them.
        """
        key: Any = module.dropout_key
        place = (key, slot)
        if not self._backward:
            self._uses[place] += 1
            return self._uses[place] - 1
        if self._uses[place] > 1:
            raise ConfigError(
                f"dropout_by_sample=true: {type(module).__name__} drops {self._uses[place]} times in a pass, and is "
                "computed anew in the backward pass; tell its uses apart by slot= (exp.models.dropout), or turn off "
                "dropout_by_sample or the model's checkpointing"
            )
        return 0

    def end(self) -> None:
        """What is drawn from here on is drawn from the device's generator."""
        global _active
        _active = None


def _draws_by_itself(module: nn.Module) -> bool:
    if getattr(module, "draws_by_itself", False):
        return True
    dropouts = tuple(kind for name, kind in vars(nn).items() if "Dropout" in name)
    if isinstance(module, dropouts):
        return not isinstance(module, (Dropout, Dropout2d)) and module.p > 0.0
    return isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and bool(module.dropout)


def draws_by_sample() -> bool:
    """Whether masks are to come from :func:`sample_mask` now."""
    return _active is not None


def sample_mask(
    module: nn.Module, like: torch.Tensor, p: float, slot: int = 0, per_sample: bool = False
) -> torch.Tensor:
    """What a tensor is multiplied with to drop elements of it, scaled so that the mean remains.

    Args:
        module: whose mask it is.
        like: (B * n, ...), samples outermost: the B samples of the micro-batch, n rows of each.
        p: probability in [0, 1) of dropping; rounded to a multiple of 2**-16.
        slot: tells several masks of one module apart.
        per_sample: one draw for each row, instead of one for each element.

    Returns:
        0 or 1 / (1 - p), of the device and dtype of ``like``, whose shape it has; (B * n, 1, ...) with ``per_sample``.

    Raises:
        ValueError: the rows of ``like`` are not those of B samples.
        ConfigError: see :meth:`DropoutStream.use_of`.
    """
    stream = _active
    assert stream is not None
    size = stream.sampler.batch_size
    shape = (like.shape[0], *[1] * (like.dim() - 1)) if per_sample else tuple(like.shape)
    if like.shape[0] % size:
        raise ValueError(
            f"dropout_by_sample=true: {type(module).__name__} drops elements of a tensor {tuple(like.shape)}, whose "
            f"first axis is no multiple of the {size} samples of the batch; put samples first, or turn it off"
        )
    place = slot + (stream.use_of(module, slot) << 32)
    packed = struct.pack("<4q", stream.seed % 2**63, stream.step, module.dropout_key, place)
    key = zlib.crc32(packed) - 2**31
    samples = _mixed(torch.arange(stream.first, stream.first + size, dtype=torch.int32, device=like.device).add_(key))
    numbers = torch.Size(shape).numel() // size
    bits = _mixed(torch.arange(numbers, dtype=torch.int32, device=like.device) + samples.unsqueeze(1))
    threshold = min(round(p * 2**16), 2**16 - 1)
    kept = bits.bitwise_and_(0xFFFF).ge(threshold).view(shape)
    return kept.to(like.dtype).mul_(2**16 / (2**16 - threshold))


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A hash of 32-bit integers (C. Wellons, "lowbias32"), in place; shifts of signed integers keep the sign."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


class Dropout(nn.Dropout):
    """``nn.Dropout``, with masks by sample where they are asked for (:class:`DropoutStream`)."""

    def forward(self, x: torch.Tensor, slot: int = 0) -> torch.Tensor:
        """Args: x: (B * n, ...), samples outermost; slot: see :func:`sample_mask`."""
        if _active is None or not self.training or self.p == 0.0:
            return super().forward(x)
        return x * sample_mask(self, x, self.p, slot)


class Dropout2d(nn.Dropout2d):
    """``nn.Dropout2d``, which drops channels of (B, C, H, W), likewise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Args: x: (B, C, H, W)."""
        if _active is None or not self.training or self.p == 0.0:
            return super().forward(x)
        return x * sample_mask(self, x[:, :, :1, :1], self.p)
