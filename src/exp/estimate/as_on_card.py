"""How a card would compute what torch's meta device computes its own way: precision, dropout, attention.

The meta device has no autocast and none of the fused forms that cards have, and these decide how much a step keeps.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from exp.backend import FLOAT32

__all__ = ["AsOnCard"]

# What torch.autocast runs in half precision, and what in float32, by the names of torch's documentation.
_IN_HALF = """
    __matmul__ addbmm addmm addmv addr baddbmm bilinear bmm chain_matmul conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d einsum linear matmul mm mv multi_dot prelu scaled_dot_product_attention
"""
_IN_FULL = """
    __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
    cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss huber_loss
    kl_div l1_loss layer_norm log log10 log1p log2 log_softmax logsumexp margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss nll_loss norm normalize pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss
    softmax softmin softplus sum tan triplet_margin_loss
"""
_HALF, _FULL = frozenset(_IN_HALF.split()), frozenset(_IN_FULL.split())


class _FusedAttention(torch.autograd.Function):
    """What fused attention keeps: its inputs, its output, and one float32 per row of the scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: ARG004 - autograd's signature
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


class AsOnCard(TorchFunctionMode):
    """Context in which torch's functions on the meta device take the form that they have on a card.

    Args:
        precision: one of :data:`exp.backend.PRECISIONS`; :meth:`autocast` has it.
        fused_attention: whether attention without dropout is fused; with dropout it is counted unfused.
    """

    def __init__(self, precision: str, fused_attention: bool) -> None:
        super().__init__()
        self._half = None if precision in FLOAT32 else {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self._casts = False
        self._fused = fused_attention
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """As the backend's autocast for this precision: weights are cast once, and kept to the end of the context."""
        self._casts = self._half is not None
        try:
            yield
        finally:
            self._casts = False
            self._weights.clear()

    def below_autocast(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel, whose own calls are not cast: the dispatcher comes to it after autocast."""

        def run(*args: Any, **kwargs: Any) -> Any:
            casts, self._casts = self._casts, False
            try:
                return kernel(*args, **kwargs)
            finally:
                self._casts = casts

        return run

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._casts:
            name = getattr(function, "__name__", "")
            if name in _HALF:
                args, kwargs = self._cast(args, self._half), self._cast(kwargs, self._half)
            elif name in _FULL and "dtype" not in kwargs:
                args, kwargs = self._cast(args, torch.float32), self._cast(kwargs, torch.float32)
        if function is F.dropout:
            return _dropout(*args, **kwargs)
        if function is F.scaled_dot_product_attention and self._fused:
            return _attention(*args, **kwargs)
        return function(*args, **kwargs)

    def _cast(self, value: Any, dtype: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._cast(item, dtype) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            return type(value)(self._cast(item, dtype) for item in value)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if value.dtype not in (torch.float32, self._half):
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(dtype)
        kept = self._weights.get(id(value))
        if kept is None:
            kept = self._weights[id(value)] = (value, value.to(dtype))
        return kept[1]


def _dropout(
    input: torch.Tensor,  # noqa: A002 - F.dropout's
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,  # noqa: ARG001
) -> torch.Tensor:
    """A mask of one byte per element is kept, as on cards; the meta device keeps it in the type of the input."""
    if not training or p == 0.0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> torch.Tensor:
    if dropout_p > 0.0 or query.dim() != 4:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **more)
    result: torch.Tensor = _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return result
