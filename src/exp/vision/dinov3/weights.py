"""Reads DINOv3 weights under any of the names by which they are published.

Three forms are known: the authors' ``.pth`` files, Hugging Face's safetensors (transformers' DINOv3ViTModel), timm's.
All hold the same numbers; only names and the packing of query, key and value differ. The periods of the rotary
embedding are in the authors' alone: transformers and timm compute them in float32, and so it is done for their files.
Every tensor of a backbone is used, known not to count, or refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Container, Mapping

import torch

from exp.errors import ConfigError
from exp.models.names import best_prefix
from exp.vision.dinov3.blocks import rope_periods
from exp.vision.dinov3.huggingface import Beside
from exp.vision.dinov3.sizes import SIZES, Size

__all__ = [
    "adapt_published",
    "backbone_settings",
    "check_backbone",
    "is_of_head",
    "pretraining_of",
    "published_prefix",
    "refuse_other_families",
    "refuse_unclaimed",
    "with_periods",
]

_State = Mapping[str, torch.Tensor]

# Only pretraining uses these; the mask of the biases is known.
_UNUSED = re.compile(r"mask_token$|bias_mask$|^local_cls_norm")
_LANDMARK = re.compile(r"^(|.*\.)(?:storage_tokens|reg_token|embeddings\.register_tokens)$")
_INVERSE_PERIODS = re.compile(r"^(?:.*\.)?(?:rope|rope_embed|rope_embeddings)\.inv_freq$")
# Of the authors, of timm and of Hugging Face.
_CONVNEXT = re.compile(r"(?:^|\.)stages\.\d+\.(?:blocks\.|layers\.)?\d+\.(?:dwconv|conv_dw|depthwise_conv)\.")
_MMCV = re.compile(r"(?:^|\.)layers\.\d+\.attn\.attn\.in_proj_weight$")
_LEARNED = re.compile(r"(?:.*\.)?(?:pos_embed|position_embeddings|positional_embedding)$")
_SCALED = re.compile(r"(?:\.ls1\.gamma|\.gamma_1|\.layer_scale1\.lambda1)$")
_HEAD = re.compile(r"(?:\w*head\w*|classifier|fc|fc_norm|neck|decoder)\.")

_RENAMED = [
    (r"^rope_embed\.periods$", "rope.periods"),
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


def published_prefix(state: _State) -> str | None:
    """The path before the names of a published backbone, such as ``backbone.`` or ``teacher.backbone.``.

    Returns:
        An empty string for a bare backbone, None where there is none; of several, see
        :func:`exp.models.names.best_prefix`.
    """
    found = [match.group(1) for match in map(_LANDMARK.match, state) if match]
    return best_prefix(found) if found else None


def refuse_other_families(state: _State, own: Container[str], source: Path) -> None:
    """Refuse other backbones by their name, as far as they are known.

    Args:
        state: as it was read.
        own: names of the model's tensors.
        source: where they were read.

    Raises:
        ConfigError: these are the weights of a ConvNeXt, or of a ViT with learned positions, such as DINOv2's.
    """
    prefix = published_prefix(state)
    learned = [key for key in state if _LEARNED.match(key) and key not in own]
    if prefix is not None:  # what lies deeper, or elsewhere, belongs to another part
        learned = [key for key in learned if key[len(prefix) :] in ("pos_embed", "embeddings.position_embeddings")
                   and key.startswith(prefix)]  # fmt: skip
    if any(map(_CONVNEXT.search, state)):
        found = "a ConvNeXt"
    elif any(map(_MMCV.search, state)):
        found = "a ViT of mmcv's layers, such as the class DINOv3ViT of MMSegmentation models, which is not DINOv3's"
    elif learned:
        kind = "DINOv2's ViT" if any(map(_SCALED.search, state)) else "a ViT"
        found = f"{kind} with learned positions ({learned[0]})"
    else:
        return
    raise ConfigError(
        f"init_from: {source} holds {found}, but the backbones here are DINOv3's ViTs, whose positions are rotary; "
        "take weights such as dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth"
    )


def is_of_head(name: str) -> bool:
    """Whether a tensor that lies beside those of a bare backbone belongs to a head, by its published name."""
    return _HEAD.match(name) is not None


def refuse_unclaimed(state: _State, own: _State, source: Path, masked: bool = True) -> None:
    """Refuse a backbone with tensors that this one has not: what they do would be left out.

    Args:
        state: adapted weights.
        own: the backbone's.
        source: where they were read.
        masked: whether the biases of keys are multiplied by zero, as in the authors' files.

    Raises:
        ConfigError: there are some.
    """
    left = [key for key in state if key not in own]
    if not masked:
        left += [key for key in state if key.endswith("attn.qkv.bias") and state[key].chunk(3)[1].any()]
    if left:
        raise ConfigError(
            f"init_from: {source} holds a backbone of another kind than DINOv3's, which has no {', '.join(left[:4])}"
            f"{' and others' if len(left) > 4 else ''}; take weights of DINOv3"
        )


def with_periods(state: _State, about: Beside) -> dict[str, torch.Tensor]:
    """Adapted weights with the periods of the rotary embedding: those of the file, else as transformers makes them.

    Args:
        state: adapted weights; without periods they stay so where nothing tells the number of heads.
        about: what stands beside them.

    Raises:
        ConfigError: so many heads cannot be.
    """
    size, token = size_of(state), state.get("cls_token")
    heads = about.num_heads or (size.num_heads if size is not None else 0)
    if "rope.periods" in state or token is None or not heads:
        return dict(state)
    if heads < 1 or token.shape[-1] % (4 * heads):
        raise ConfigError(
            f"init_from: config.json beside the weights says {heads} attention heads, which do not divide tokens of "
            f"{token.shape[-1]} elements"
        )
    return {**state, "rope.periods": rope_periods(token.shape[-1] // heads, about.rope_base)}


def adapt_published(state: _State) -> dict[str, torch.Tensor]:
    """Published weights under the names of :class:`exp.vision.dinov3.backbone.VisionTransformer`.

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
        if _INVERSE_PERIODS.match(key):
            adapted["rope.periods"] = 1.0 / value.float()
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
    if "rope.periods" in adapted:
        adapted["rope.periods"] = adapted["rope.periods"].float()
    return adapted


def size_of(state: _State) -> Size | None:
    """The size of the model that adapted weights come from; None where they do not tell.

    The number of heads is told by the periods of the rotary embedding; without them it is the published one, or 0.
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
    periods = state.get("rope.periods")
    if periods is not None and len(periods):
        heads = [found[0] // (4 * len(periods))]
    return Size(found[0], depth, heads[0] if heads else 0, found[2], gated, 0 if storage is None else storage.shape[1])


def backbone_settings(state: _State) -> dict[str, Any]:
    """The configuration of a backbone as its adapted weights tell it; nothing where they are too few to tell.

    Args:
        state: weights by the names of the backbone.
    """
    settings: dict[str, Any] = {}
    size = size_of(state)
    name = None if size is None else _name(size)
    if size is not None and name is not None:
        settings = {"model.size": name, "model.embed_dim": None, "model.depth": None, "model.num_heads": None}
    elif size is not None:
        like = next((key for key, known in SIZES.items() if known.gated == size.gated
                     and known.hidden_dim * size.embed_dim // known.embed_dim == size.hidden_dim), None)  # fmt: skip
        settings = {} if like is None else {"model.size": like}
        settings.update({"model.embed_dim": size.embed_dim, "model.depth": size.depth})
        if size.num_heads:
            settings["model.num_heads"] = size.num_heads
    embedding = state.get("patch_embed.proj.weight")
    if embedding is not None and embedding.dim() == 4:
        settings.update({"data.channels": embedding.shape[1], "model.patch_size": embedding.shape[2]})
    return settings


def check_backbone(state: _State, own: _State, source: Path) -> None:
    """Refuse weights of another size or patch size than the model's.

    Args:
        state: adapted weights.
        own: the backbone's.
        source: where they were read.

    Raises:
        ConfigError: they are of another size; names both, and the keys that mend it.
    """
    found, size = size_of(state), size_of(own)
    assert size is not None
    there, here = backbone_settings(state), backbone_settings(own)
    mend = [f"{key}={'null' if value is None else value}" for key, value in there.items()
            if key != "data.channels" and key in here and here[key] != value]  # fmt: skip
    if found is not None and (found.embed_dim, found.depth, found.hidden_dim, found.gated) != (
        size.embed_dim, size.depth, size.hidden_dim, size.gated):  # fmt: skip
        raise ConfigError(
            f"init_from: {source} holds {_describe(found)}, but the model is {_describe(size)}; "
            f"set {' '.join(mend)}, or take weights of this size"
        )
    if found is not None and found.num_heads not in (0, size.num_heads):
        raise ConfigError(
            f"init_from: {source} holds weights for {found.num_heads} attention heads, the model has "
            f"{size.num_heads}; set {' '.join(mend)}"
        )
    name = "model.patch_size"
    if there.get(name, here[name]) != here[name]:
        raise ConfigError(
            f"init_from: {source} has patches of {there[name]} pixels, the model of {here[name]}; "
            f"set {name}={there[name]}"
        )


def pretraining_of(state: _State, source: Path) -> str | None:
    """Which images weights were pretrained on, as their file tells.

    Args:
        state: as it was read.
        source: the file.

    Returns:
        ``satellite`` or ``web``; None where neither the names nor the weights tell.
    """
    # In the cache of a hub the name is two folders above that of the commit.
    named = source.parent.parent.parent if source.parent.parent.name == "snapshots" else source.parent
    text = f"{named.name}/{source.name}".lower()
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
