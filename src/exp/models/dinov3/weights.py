"""Reads DINOv3 weights under any of the names by which they are published.

Three forms are known: the authors' ``.pth`` files, Hugging Face's safetensors (transformers' DINOv3ViTModel), timm's.
All hold the same numbers; only names and the packing of query, key and value differ.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Mapping

import torch

from exp.errors import CheckpointError
from exp.models.dinov3.sizes import SIZES, Size

__all__ = ["adapt_published", "check_size", "is_published", "pretraining_of"]

_State = Mapping[str, torch.Tensor]

# Only pretraining uses these; angles of the rotary embedding are computed, and the mask of the biases is known.
_UNUSED = re.compile(r"mask_token$|rope|bias_mask$|^local_cls_norm|inv_freq$")

_RENAMED = [
    # Hugging Face
    (r"^(?:model\.)?layer\.", "blocks."),
    (r"^embeddings\.patch_embeddings\.", "patch_embed.proj."),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.register_tokens$", "storage_tokens"),
    (r"\.attention\.o_proj\.", ".attn.proj."),
    (r"\.attention\.", ".attn."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"\.mlp\.gate_proj\.", ".mlp.w1."),
    # timm
    (r"^reg_token$", "storage_tokens"),
    (r"\.gamma_([12])$", r".ls\1.gamma"),
    (r"\.mlp\.fc1_g\.", ".mlp.w1."),
    (r"\.mlp\.fc1_x\.", ".mlp.w2."),
]
# The same name stands for different things, with a gate and without.
_FEED_FORWARD = {
    True: [(r"\.mlp\.up_proj\.", ".mlp.w2."), (r"\.mlp\.(?:down_proj|fc2)\.", ".mlp.w3.")],
    False: [(r"\.mlp\.up_proj\.", ".mlp.fc1."), (r"\.mlp\.down_proj\.", ".mlp.fc2.")],
}
_SEPARATE = re.compile(r"^(blocks\.\d+\.attn\.)(?:([qkv])_proj\.(weight|bias)|([qv])_bias)$")


def is_published(state: _State) -> bool:
    """Whether these are weights of a bare backbone in one of the three forms (ours have a prefix before each name)."""
    return any(key in state for key in ("storage_tokens", "reg_token", "embeddings.register_tokens"))


def adapt_published(state: _State) -> dict[str, torch.Tensor]:
    """Published weights under the names of :class:`exp.models.dinov3.backbone.VisionTransformer`.

    Args:
        state: tensors by name, in one of the three forms.

    Returns:
        The weights that the backbone has; a bias that a form leaves out, because it is zero, is put in.
    """
    gated = any(re.search(r"mlp\.(w1|gate_proj|fc1_g)\.", key) for key in state)
    renames = [(re.compile(pattern), name) for pattern, name in (*_RENAMED, *_FEED_FORWARD[gated])]
    adapted: dict[str, torch.Tensor] = {}
    separate: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in state.items():
        if _UNUSED.search(key):
            continue
        for pattern, name in renames:
            key = pattern.sub(name, key)
        match = _SEPARATE.match(key)
        if match:
            block, projection, kind, bias_of = match.groups()
            name, kind = (bias_of, "bias") if bias_of else (projection, kind)
            separate.setdefault(f"{block}qkv.{kind}", {})[name] = value
        else:
            adapted[key] = value
    for key, parts in separate.items():
        # Keys have no bias.
        adapted[key] = torch.cat([parts.get(name, torch.zeros_like(parts["q"])) for name in "qkv"])
    for key in [key for key in adapted if key.endswith("attn.qkv.weight")]:
        bias = key[: -len("weight")] + "bias"
        if bias not in adapted:  # timm drops biases that are all zero
            adapted[bias] = adapted[key].new_zeros(adapted[key].shape[0])
    return adapted


def size_of(state: _State) -> Size | None:
    """The size of the model that adapted weights come from; None where they do not tell.

    The number of heads is not in them: it is the published one, or 0.
    """
    token, storage = state.get("cls_token"), state.get("storage_tokens")
    depth = len({key.split(".")[1] for key in state if key.startswith("blocks.")})
    gated = "blocks.0.mlp.w1.weight" in state
    hidden = state.get("blocks.0.mlp.w1.weight" if gated else "blocks.0.mlp.fc1.weight")
    if token is None or hidden is None:
        return None
    found = (token.shape[-1], depth, hidden.shape[0], gated)
    heads = [size.num_heads for size in SIZES.values()
             if (size.embed_dim, size.depth, size.hidden_dim, size.gated) == found]  # fmt: skip
    return Size(found[0], depth, heads[0] if heads else 0, found[2], gated, 0 if storage is None else storage.shape[1])


def check_size(state: _State, size: Size, source: Path) -> None:
    """Refuse weights of another size than the model's.

    Args:
        state: adapted weights.
        size: of the model.
        source: where they were read.

    Raises:
        CheckpointError: they are of another size; names both.
    """
    found = size_of(state)
    if found is None or (found.embed_dim, found.depth, found.hidden_dim, found.gated) == (
        size.embed_dim, size.depth, size.hidden_dim, size.gated):  # fmt: skip
        return
    name = _name(found)
    advice = f"set model.size={name}" if name else "set model.size, model.embed_dim and model.depth to match"
    raise CheckpointError(
        f"init_from: {source} holds {_describe(found)}, but the model is {_describe(size)}; "
        f"{advice}, or take weights of this size"
    )


def pretraining_of(state: _State, source: Path) -> str | None:
    """Which images weights were pretrained on, as their file tells.

    Args:
        state: as it was read.
        source: the file.

    Returns:
        ``satellite`` or ``web``; None where neither the names nor the weights tell.
    """
    text = f"{source.parent.name}/{source.name}".lower()
    if "sat493m" in text:
        return "satellite"
    if "lvd1689m" in text:
        return "web"
    # Of the sizes below 7B only the satellite model was published with this norm.
    tokens = state.get("cls_token")
    if "local_cls_norm.weight" in state and tokens is not None and tokens.shape[-1] == SIZES["vitl16"].embed_dim:
        return "satellite"
    return None


def _name(size: Size) -> str | None:
    return next((name for name, known in SIZES.items() if known == size), None)


def _describe(size: Size) -> str:
    kind = "SwiGLU" if size.gated else "MLP"
    shape = f"{size.embed_dim} wide, {size.depth} blocks, {kind} {size.hidden_dim}"
    name = _name(size)
    return f"{name} ({shape})" if name else f"a model {shape}"
