"""Counts the memory of tensors on the meta device as the allocator of a card would."""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any, Callable, ContextManager, Iterable

import torch
from torch import nn

from exp.data.loader import map_tensors, tensors_of
from exp.hardware.compat import dispatch_mode

KINDS = ("parameters", "gradients", "optimizer", "wrapper", "buffers", "data", "batch", "activations")
"""Kinds of memory. ``activations`` are all tensors of a pass: those saved for the backward pass, and temporary ones."""
META = torch.device("meta")
_BLOCK = 512
"""Cards allocate memory in multiples of this number of bytes."""
# Functions that torch.autocast runs in half precision and in float32, from torch's documentation; functions that
# exp's models do not use are left out.
_IN_HALF = """
    __matmul__ addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d einsum
    linear matmul mm mv prelu scaled_dot_product_attention
"""
_IN_FULL = """
    __pow__ binary_cross_entropy_with_logits cdist cosine_similarity cross_entropy cumsum exp group_norm huber_loss
    kl_div l1_loss layer_norm log log1p log_softmax logsumexp mse_loss nll_loss norm normalize pow prod rsqrt
    smooth_l1_loss softmax softplus sum
"""
_HALF, _FULL = frozenset(_IN_HALF.split()), frozenset(_IN_FULL.split())
_FunctionMode: Any = getattr(torch.overrides, "TorchFunctionMode", object)  # torch >= 1.13


class MetaAllocator(_FunctionMode):
    """Counts the memory of storages on the meta device; as a context, gives torch functions their form on a card.

    The meta device has neither autocast nor fused attention, and both change how much a step saves for backward. Like
    ``torch.autocast``, the context casts each weight once, and keeps the copy until it ends. Storages count from their
    creation until their last tensor is freed. Memory that an operator uses internally, such as the workspace of a
    convolution, is not counted; the temporary tensors of portable kernels are.

    Args:
        precision: one of :data:`exp.hardware.backend.PRECISIONS`.
        fused_attention: whether attention is fused; with dropout it never is.

    Attributes:
        kernels: portable kernels (:mod:`exp.hardware.operators`) that replace operators of torch, by ATen name.
        live: bytes that are alive, by kind, and their ``total``.
        peak: bytes that were alive at the peak, likewise.
    """

    def __init__(self, precision: str, fused_attention: bool) -> None:
        super().__init__()
        self.live = dict.fromkeys((*KINDS, "total"), 0)
        self.peak = dict(self.live)
        self._storages: dict[int, tuple[str, int, Any]] = {}
        self._half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self._fused = fused_attention
        self.kernels: dict[str, Callable[..., Any]] = {}
        self._cast_weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def tracking(self, kind: str = "activations", share: float = 1.0) -> ContextManager[Any]:
        """Context in which the results of every operator are counted as ``kind``, with a ``share`` of their bytes."""
        return dispatch_mode(functools.partial(self._run_operator, kind, share))

    def __exit__(self, *error: Any) -> None:
        self._cast_weights.clear()
        super().__exit__(*error)

    def add_bytes(self, kind: str, size: int) -> None:
        """Count ``size`` bytes that no operator allocates, such as DDP's gradient buckets."""
        self.live[kind] += size
        self.live["total"] += size
        if self.live["total"] > self.peak["total"]:
            self.peak = dict(self.live)

    def track(self, values: Any, kind: str, share: float = 1.0, reclassify: bool = True) -> None:
        """Count storages as ``kind``.

        Args:
            values: tensors, also nested in lists, tuples and mappings.
            kind: one of :data:`KINDS`.
            share: share of their bytes that counts.
            reclassify: whether storages that are counted already get the new kind; otherwise they keep theirs.
        """
        for tensor in filter(lambda tensor: tensor.is_meta, tensors_of(values)):
            storage = tensor.untyped_storage()
            key = id(storage)  # torch keeps one Python object per storage as long as the storage lives
            if key in self._storages and not reclassify:
                continue
            self._forget(key)
            size = round_to_block(storage.nbytes() * share)
            self._storages[key] = kind, size, weakref.ref(storage, functools.partial(self._forget, key))
            self.add_bytes(kind, size)

    def _forget(self, key: int, freed: Any = None) -> None:
        kind, size, _ = self._storages.pop(key, ("activations", 0, None))
        self.add_bytes(kind, -size)

    def _run_operator(self, kind: str, share: float, operator: Any, arguments: Any, keywords: Any) -> Any:
        kernel = self.kernels.get(operator.overloadpacket.__name__)
        if kernel is None:
            result = operator(*arguments, **keywords)
        else:  # the dispatcher calls a kernel after autocast, so operators inside it are not cast
            with self.tracking(kind, share), torch._C.DisableTorchFunction():
                result = kernel(*arguments, **keywords)
        # The mask of dropout has a byte per element on a card.
        is_mask = operator.overloadpacket.__name__ == "bernoulli_"
        self.track(result, kind, share / result.element_size() if is_mask else share, reclassify=is_mask)
        return result

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if self._half and (name in _HALF or (name in _FULL and "dtype" not in kwargs)):
            args, kwargs = self._cast((args, kwargs), self._half if name in _HALF else torch.float32)
        if name == "scaled_dot_product_attention" and self._fused:
            return _fused_attention(*args, **kwargs)
        return function(*args, **kwargs)

    def _cast(self, values: Any, dtype: Any) -> Any:
        def cast(value: torch.Tensor) -> torch.Tensor:
            if value.dtype not in {torch.float32, self._half} - {dtype}:
                return value
            if not (value.is_leaf and value.requires_grad):
                return value.to(dtype)
            if id(value) not in self._cast_weights:
                self._cast_weights[id(value)] = value, value.to(dtype)
            return self._cast_weights[id(value)][1]

        return map_tensors(cast, values)


def _fused_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **more: Any
) -> Any:
    """Attention with the fused kernel, where there is one: it saves its inputs, its output and a number per row."""
    if dropout_p > 0.0 or query.dim() != 4:
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **more)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]


def round_to_block(count: float) -> int:
    """A number of bytes, rounded up to what a card allocates."""
    return math.ceil(count / _BLOCK) * _BLOCK


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all elements of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
