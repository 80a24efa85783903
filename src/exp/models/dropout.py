"""Dropout whose masks depend only on (seed, step, layer, sample, position), if ``dropout_by_sample=true``.

A training with dropout then gives the same result on any number and kind of devices, also if the number changes on
resume. Masks come from a hash of counters instead of a random generator; the hash uses 32-bit integers, which all
devices compute alike. It takes about ten operators instead of one, and prevents fused attention. So it is off by
default; without it, this module uses torch's dropout.

A model uses :class:`Dropout` instead of ``nn.Dropout``, and :func:`sample_mask` for its own masks. A module that draws
random numbers otherwise sets ``uses_global_rng = True``. A module that is called several times per forward pass gets a
new mask each time, by the order of the calls. With activation checkpointing the order in the backward pass differs, so
the caller must distinguish the calls by ``slot``.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any, Iterator

import torch
from torch import nn

from exp.errors import ConfigError

if TYPE_CHECKING:
    from exp.data.loader import TrainBatchSampler


class DropoutStream:
    """The counters from which the masks of a training are computed.

    Args:
        model: the model, not wrapped; each module gets this object as ``dropout_stream``, and a ``dropout_key``, a hash
            of its name.
        sampler: of the training; determines which samples of the global batch this rank has.
        seed: of the run.
    """

    def __init__(self, model: nn.Module, sampler: TrainBatchSampler, seed: int) -> None:
        self.sampler, self.seed = sampler, seed
        self.step = self.first = 0
        self.size = sampler.batch_size
        self.is_active = False  # between begin() and end()
        self._uses: Counter[tuple[int, int]] = Counter()  # by module and slot
        self._backward = False
        for name, module in model.named_modules():
            module.dropout_key, module.dropout_stream = zlib.crc32(name.encode()), self
        drawing = ((name, module) for name, module in model.named_modules() if uses_global_rng(module))
        self.left_out = [name or type(module).__name__ for name, module in drawing]
        """Names of the modules that still draw from the device's generator."""

    def __deepcopy__(self, memo: Any) -> DropoutStream:
        """A copy of a model draws the same masks."""
        return self

    def begin(self, step: int, micro_batch: int, first: int = 0, size: int | None = None) -> None:
        """Start a micro-batch: until :meth:`end`, masks are those of its samples.

        Args:
            step: number of completed optimizer steps.
            micro_batch: index of the micro-batch within the step.
            first: index of the first sample in the micro-batch, if only some of its samples are used.
            size: number of samples; None: all.
        """
        sampler = self.sampler
        self.step = step
        # Index of the first sample within the step, so that the masks do not depend on the number of ranks.
        self.first = micro_batch * sampler.micro_batch_size + sampler.first + first
        self.size = size or sampler.batch_size
        self._uses.clear()
        self._backward = False
        self.is_active = True

    @contextlib.contextmanager
    def during_backward(self) -> Iterator[None]:
        """Context of a backward pass: masks are for recomputed activations, and repeat those of the forward pass."""
        self._backward = True
        yield
        self._backward = False

    def call_index(self, module: nn.Module, slot: int) -> int:
        """Index of the current mask of a module and slot in this forward pass.

        Raises:
            ConfigError: there were several masks, and the backward pass recomputes one of them.
        """
        key: Any = module.dropout_key
        call_id = (key, slot)
        if not self._backward:
            self._uses[call_id] += 1
            return self._uses[call_id] - 1
        if self._uses[call_id] > 1:
            raise ConfigError(
                f"dropout_by_sample=true: {type(module).__name__} is called {self._uses[call_id]} times per forward "
                "pass, and recomputed in the backward pass; give each call its own slot= (exp.models.dropout), or turn "
                "off dropout_by_sample or the model's checkpointing"
            )
        return 0

    def end(self) -> None:
        """Stop computing masks by sample: dropout draws from the device's generator again."""
        self.is_active = False


def uses_global_rng(module: nn.Module) -> bool:
    """Whether a module draws random numbers from the device's generator, also with ``dropout_by_sample=true``."""
    if getattr(module, "uses_global_rng", False):
        return True
    dropouts = tuple(kind for name, kind in vars(nn).items() if "Dropout" in name)
    if isinstance(module, dropouts):
        return not isinstance(module, (Dropout, Dropout2d)) and module.p > 0.0
    return isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and bool(module.dropout)


def per_sample_active(module: nn.Module) -> bool:
    """Whether masks of a module must come from :func:`sample_mask` now."""
    stream: Any = getattr(module, "dropout_stream", None)
    return stream is not None and stream.is_active


def sample_mask(
    module: nn.Module, like: torch.Tensor, p: float, slot: int = 0, per_sample: bool = False
) -> torch.Tensor:
    """Dropout mask by which a tensor is multiplied. Call it only while :func:`per_sample_active` is True.

    Args:
        module: the module that drops.
        like: the tensor, (B * n, ...): the B samples of the micro-batch on the first axis, with n rows each.
        p: probability in [0, 1) of dropping; rounded to a multiple of 2**-16.
        slot: distinguishes several masks of one module.
        per_sample: draw one value per row, instead of one per element.

    Returns:
        Values 0 or 1 / (1 - p), on the device and of the dtype and shape of ``like``; with ``per_sample`` of shape
        (B * n, 1, ...).

    Raises:
        ValueError: the number of rows of ``like`` is not a multiple of B.
        ConfigError: see :meth:`DropoutStream.call_index`.
    """
    stream: Any = module.dropout_stream
    size = stream.size
    shape = (like.shape[0], *[1] * (like.dim() - 1)) if per_sample else tuple(like.shape)
    if like.shape[0] % size:
        raise ValueError(
            f"dropout_by_sample=true: {type(module).__name__} drops elements of a tensor {tuple(like.shape)}, whose "
            f"first axis is not a multiple of the {size} samples of the batch; put samples first, or turn it off"
        )
    call_key = slot + (stream.call_index(module, slot) << 32)
    packed = struct.pack("<4q", stream.seed % 2**63, stream.step, module.dropout_key, call_key)
    key = zlib.crc32(packed) - 2**31
    samples = _hash32(torch.arange(stream.first, stream.first + size, dtype=torch.int32, device=like.device).add_(key))
    numbers = torch.Size(shape).numel() // size
    bits = _hash32(torch.arange(numbers, dtype=torch.int32, device=like.device) + samples.unsqueeze(1))
    threshold = min(round(p * 2**16), 2**16 - 1)
    mask = bits.bitwise_and_(0xFFFF).ge(threshold).view(shape)
    return mask.to(like.dtype).mul_(2**16 / (2**16 - threshold))


def _hash32(x: torch.Tensor) -> torch.Tensor:
    """Hash 32-bit integers in place (C. Wellons, "lowbias32"). The masks clear sign bits that signed shifts copy."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


class Dropout(nn.Dropout):
    """``nn.Dropout``, with masks by sample if ``dropout_by_sample=true`` (:class:`DropoutStream`)."""

    dropout_stream: DropoutStream | None = None

    def forward(self, x: torch.Tensor, slot: int = 0) -> torch.Tensor:
        """Args: x: (B * n, ...), with samples on the first axis; slot: see :func:`sample_mask`."""
        if not self.training or self.p == 0.0 or not per_sample_active(self):
            return super().forward(x)
        return x * sample_mask(self, x, self.p, slot)


class Dropout2d(nn.Dropout2d):
    """``nn.Dropout2d``, which drops channels of (B, C, H, W), with masks by sample likewise."""

    dropout_stream: DropoutStream | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Args: x: (B, C, H, W)."""
        if not self.training or self.p == 0.0 or not per_sample_active(self):
            return super().forward(x)
        return x * sample_mask(self, x[:, :, :1, :1], self.p)


class DropPath(nn.Module):
    """A sample skips a residual branch with probability ``p`` in training (Huang et al., arXiv 1603.09382)."""

    dropout_stream: DropoutStream | None = None

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, branch: torch.Tensor, slot: int = 0) -> torch.Tensor:
        """Args: branch: (B, ...), what is added to the residual; slot: see :func:`sample_mask`."""
        return drop_path(self, branch, self.p, slot)


def drop_path(module: nn.Module, branch: torch.Tensor, p: float, slot: int = 0) -> torch.Tensor:
    """Leave out a residual branch of some samples.

    Args:
        module: the module that has the branch; its mode and, by sample, its name count.
        branch: (B, ...), what is added to the residual.
        p: probability with which a sample skips the branch.
        slot: see :func:`sample_mask`.
    """
    if not module.training or p == 0.0:
        return branch
    if per_sample_active(module):
        return branch * sample_mask(module, branch, p, slot, per_sample=True)
    keep, shape = 1.0 - p, (branch.shape[0], *[1] * (branch.dim() - 1))
    return branch * (torch.empty(shape, device=branch.device, dtype=branch.dtype).bernoulli_(keep) / keep)
