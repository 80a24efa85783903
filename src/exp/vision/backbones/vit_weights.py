"""The published vision transformers of DINOv3: their sizes, and their weights.

Weights are read with the names of the authors, of transformers and of timm, and written with those of transformers.

All three have the same values; only names and the packing of query, key and value differ. Only the authors' files have
the periods of the rotary embedding: transformers and timm compute them in float32, and so do we for their files. What
tensors do not show, such as the number of heads, is in the JSON files beside the weights of transformers and timm.
Every tensor of a backbone is used, known to be unneeded, or refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

import torch
from safetensors.torch import save

from exp.errors import ConfigError
from exp.runs.files import write_atomically, write_json
from exp.vision.backbones.base import Published, State
from exp.vision.backbones.published import check_config, find_prefix, pixel_statistics

__all__ = ["NORM_EPS", "ROPE_BASE", "SIZES", "SidecarConfig", "Size", "check_backbone", "pretraining_of",
           "read_published", "read_sidecar_config", "rope_periods", "write_huggingface"]  # fmt: skip


@dataclass(frozen=True)
class Size:
    """The dimensions of a model of the family, a row of the paper's table.

    Attributes:
        embed_dim: elements of a token (D).
        depth: blocks.
        num_heads: attention heads.
        hidden_dim: hidden units of the feed-forward layers.
        gated: whether these are SwiGLU (arXiv 2002.05202) instead of a GELU MLP.
        storage_tokens: register tokens (arXiv 2309.16588).
    """

    embed_dim: int
    depth: int
    num_heads: int
    hidden_dim: int
    gated: bool = False
    storage_tokens: int = 4


# The paper's "x6" and "x3" of SwiGLU count both input projections, with as many parameters as an MLP: x4 and x2 here.
SIZES = {
    "tiny": Size(192, 4, 3, 768),  # not published: for quick runs from random weights
    "vits16": Size(384, 12, 6, 1536),
    "vits16plus": Size(384, 12, 6, 1536, gated=True),
    "vitb16": Size(768, 12, 12, 3072),
    "vitl16": Size(1024, 24, 16, 4096),
    "vitl16plus": Size(1024, 24, 16, 4096, gated=True),
    "vith16plus": Size(1280, 32, 20, 5120, gated=True),
    "vit7b16": Size(4096, 40, 32, 8192, gated=True),
}
"""The sizes by name."""


# Epsilon of all layer norms.
NORM_EPS = 1e-5

# Base of the periods of the rotary embedding; the longest period is slightly shorter.
ROPE_BASE = 100.0


def rope_periods(head_dim: int, base: float = ROPE_BASE) -> torch.Tensor:
    """Periods of the rotary embedding, float32 (head_dim / 4,): base ** (k / (head_dim / 4)) for k = 0, 1, ..."""
    quarter = head_dim // 4
    return base ** (torch.arange(quarter, dtype=torch.float32) / quarter)


_MODEL_TYPE = "dinov3_vit"

_NAMES = {
    ".blocks.": (".layer.",), ".patch_embed.proj.": (".embeddings.patch_embeddings.",),
    ".cls_token": (".embeddings.cls_token",), ".storage_tokens": (".embeddings.register_tokens", ".reg_token"),
    ".attn.proj.": (".attention.o_proj.",), ".rope.periods": (".rope_embed.periods",),
    ".ls1.gamma": (".layer_scale1.lambda1", ".gamma_1"), ".ls2.gamma": (".layer_scale2.lambda1", ".gamma_2"),
}  # fmt: skip
"""Parts of names, each with a leading dot: ours -> those of transformers and timm (of the periods: the authors')."""
_MLP_NAMES: dict[bool, dict[str, tuple[str, ...]]] = {
    True: {".mlp.w1.": (".mlp.gate_proj.", ".mlp.fc1_g."), ".mlp.w2.": (".mlp.up_proj.", ".mlp.fc1_x."),
           ".mlp.w3.": (".mlp.down_proj.", ".mlp.fc2.")},
    False: {".mlp.fc1.": (".mlp.up_proj.",), ".mlp.fc2.": (".mlp.down_proj.",)},
}  # fmt: skip
"""The same for gated (True) and plain (False) feed-forward layers, in which one name means different layers."""
_SEPARATE = re.compile(r"^(blocks\.\d+\.)(?:attn|attention)\.([qkv])_(?:proj\.)?(weight|bias)$")

# Ignored: tensors of pretraining, and two that are constants (mask of the biases, inverse periods).
_UNUSED = re.compile(r"mask_token$|bias_mask$|^local_cls_norm|(?:^|\.)inv_freq$")
_LANDMARK = re.compile(r"^(|.*\.)(?:storage_tokens|reg_token|embeddings\.register_tokens)$")
_CONVNEXT = re.compile(r"(?:^|\.)(?:stages\.\d+\..*(?:dwconv|depthwise_conv|conv_dw)|downsample_layers\.\d)")
_HEAD = re.compile(r"(?:\w*head\w*|classifier|fc|fc_norm|neck|decoder)\.")
"""Published names of tensors that belong to a head, beside those of a backbone without prefix."""


def _adapt_published(state: State) -> dict[str, torch.Tensor]:
    """Published weights under the names of :class:`exp.vision.backbones.vit.VisionTransformer`.

    Args:
        state: tensors by name, with the names of the authors, transformers or timm.

    Returns:
        The weights of the backbone, with zeros for biases that a file leaves out because they are zero.
    """
    gated = any(re.search(r"mlp\.(w1|gate_proj|fc1_g)\.", key) for key in state)
    renamed = {old: new for new, names in {**_NAMES, **_MLP_NAMES[gated]}.items() for old in names}
    adapted: dict[str, torch.Tensor] = {}
    separate: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in state.items():
        if _UNUSED.search(key):
            continue
        key = f".{key}".replace(".model.layer.", ".layer.")
        for old, new in renamed.items():
            key = key.replace(old, new)
        match = _SEPARATE.match(key[1:])
        if match:
            block, projection, kind = match.groups()
            separate.setdefault(f"{block}attn.qkv.{kind}", {})[projection] = value
        else:
            adapted[key[1:]] = value
    for key, parts in separate.items():  # keys have no bias
        adapted[key] = torch.cat([parts.get(name, torch.zeros_like(parts["q"])) for name in "qkv"])
    for key in [key for key in adapted if key.endswith("attn.qkv.weight")]:  # timm drops biases that are all zero
        adapted.setdefault(f"{key[: -len('weight')]}bias", adapted[key].new_zeros(len(adapted[key])))
    if "rope.periods" in adapted:
        adapted["rope.periods"] = adapted["rope.periods"].float()
    return adapted


def _with_periods(state: State, sidecar: SidecarConfig) -> dict[str, torch.Tensor]:
    """Add the periods of the rotary embedding if the weights have none, as transformers computes them.

    Args:
        state: adapted weights.
        sidecar: content of the files beside them.

    Returns:
        The weights; still without periods if the number of heads is not known.
    """
    token = state.get("cls_token")
    heads = sidecar.num_heads or _infer_keys(state)[1]
    if "rope.periods" in state or token is None or not heads:
        return dict(state)
    return {**state, "rope.periods": rope_periods(token.shape[-1] // heads, sidecar.rope_base)}


def _infer_keys(state: State) -> tuple[dict[str, Any], int]:
    """Infer the keys of ``model`` and the number of heads from adapted weights of a backbone.

    The number of heads follows from the periods of the rotary embedding; without them it is that of the published size,
    or 0 (not known).
    """
    token, embedding = state.get("cls_token"), state.get("patch_embed.proj.weight")
    gated = "blocks.0.mlp.w1.weight" in state
    first = state.get("blocks.0.mlp.w1.weight" if gated else "blocks.0.mlp.fc1.weight")
    keys: dict[str, Any] = {}
    if embedding is not None and embedding.dim() == 4:
        keys["patch_size"] = embedding.shape[2]
    if token is None or first is None:
        return keys, 0
    dim, depth = token.shape[-1], len({key.split(".")[1] for key in state if key.startswith("blocks.")})
    same_ratio = {name: size for name, size in SIZES.items()
            if size.gated == gated and size.hidden_dim * dim == len(first) * size.embed_dim}  # fmt: skip
    published = {name: size for name, size in same_ratio.items() if (size.embed_dim, size.depth) == (dim, depth)}
    periods = state.get("rope.periods")
    heads = next((size.num_heads for size in published.values()), 0) if periods is None else dim // (4 * len(periods))
    for name, size in published.items():
        if size.num_heads == heads:
            return {**keys, "size": name, "embed_dim": None, "depth": None, "num_heads": None}, heads
    if same_ratio:
        keys["size"] = next(iter(same_ratio))
    return {**keys, "embed_dim": dim, "depth": depth, **({"num_heads": heads} if heads else {})}, heads


def _refuse_convnext(state: State, source: Path) -> None:
    """Refuse the weights of a ConvNeXt, in the names of the authors, transformers or timm.

    Raises:
        ConfigError: a tensor is that of a ConvNeXt.
    """
    if any(map(_CONVNEXT.search, state)):
        raise ConfigError(
            f"init_from: {source} holds a ConvNeXt, and the model has a ViT; set model/backbone=dinov3_convnext_tiny"
        )


def check_backbone(state: State, model_state: State, source: Path) -> None:
    """Refuse weights of another size, patch size or kind than the model's.

    Args:
        state: adapted weights, without low-rank updates.
        model_state: the weights of the model's backbone.
        source: the file of the weights.

    Raises:
        ConfigError: the size differs (the message has the keys to set), or there are tensors that the backbone lacks.
    """
    (file_keys, _), (model_keys, _) = _infer_keys(state), _infer_keys(model_state)
    differing = [key for key, value in file_keys.items() if model_keys.get(key) != value]
    if differing:
        model_settings, file_settings = (
            " ".join(f"model.backbone.{key}={'null' if keys.get(key) is None else keys[key]}" for key in differing)
            for keys in (model_keys, file_keys)
        )
        raise ConfigError(
            f"init_from: {source} holds weights of another backbone, and the model has {model_settings}; set "
            f"{file_settings}"
        )
    unexpected = [name for name in state if name not in model_state]
    if unexpected:
        raise ConfigError(
            f"init_from: {source} holds a backbone of another kind than DINOv3's, such as DINOv2's: DINOv3's has no "
            f"{', '.join(unexpected[:4])}{' and others' if len(unexpected) > 4 else ''}; take weights of DINOv3"
        )


def pretraining_of(source: Path) -> str | None:
    """The images that weights were pretrained on, by the file's name: ``satellite`` or ``web``; None: not known."""
    # In the cache of a hub the model's name is two folders above the commit's folder.
    model_folder = source.parent.parent.parent if source.parent.parent.name == "snapshots" else source.parent
    text = f"{model_folder.name}/{source.name}".lower()
    return next((images for name, images in (("sat493m", "satellite"), ("lvd1689m", "web")) if name in text), None)


class SidecarConfig(NamedTuple):
    """Content of ``config.json`` and ``preprocessor_config.json`` in the folder of the weights.

    Attributes:
        num_heads: attention heads; 0: not known.
        rope_base: the base of the rotary embedding's periods.
        statistics: mean and standard deviation of each channel, 0..255; None: not known.
        from_exp: whether ``task=export`` has written the files: channels are then bands of the data, in their order.
    """

    num_heads: int = 0
    rope_base: float = ROPE_BASE
    statistics: tuple[list[float], list[float]] | None = None
    from_exp: bool = False


def read_sidecar_config(source: Path) -> SidecarConfig:
    """Read the JSON files beside a file of weights, as transformers and timm write them; the defaults without them.

    Raises:
        ConfigError: the JSON files are of another model, or cannot be read.
    """
    statistics = pixel_statistics(source)
    expected = {"model_type": _MODEL_TYPE, "layer_norm_eps": NORM_EPS}
    config = check_config(source, expected, f"one of DINOv3's ViTs ({_MODEL_TYPE})")
    activation = "silu" if config.get("use_gated_mlp") else "gelu"
    check_config(source, {"hidden_act": activation}, f"one of DINOv3's ViTs ({_MODEL_TYPE})")
    try:
        rope = config.get("rope_parameters") or config
        heads, base = int(config.get("num_attention_heads", 0)), float(rope.get("rope_theta", ROPE_BASE))
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"init_from: config.json beside {source} cannot be read ({error})") from error
    return SidecarConfig(heads, base, statistics, from_exp="band_names" in config)


def read_published(backbone: Any, state: State, source: Path) -> Published | None:
    """Read a published file, with rotary periods and pixel statistics from the files beside it.

    The backbone may have a prefix such as ``teacher.backbone.``; the heads of that model are not used.

    Args:
        backbone: an :class:`exp.vision.backbones.vit.VisionTransformer`; its ``unverifiable_keys`` are set.
        state: tensors by name.
        source: the file.

    Raises:
        ConfigError: the weights are of another family.
    """
    _refuse_convnext(state, source)
    prefix = find_prefix(_LANDMARK, state)
    if prefix is None:
        return None
    sidecar = read_sidecar_config(source)
    own = {key[len(prefix) :]: value for key, value in state.items()
           if key.startswith(prefix) and (prefix or not _HEAD.match(key))}  # fmt: skip
    others = {key: value for key, value in state.items()
              if not key.startswith(prefix) or key[len(prefix) :] not in own}  # fmt: skip
    weights = _with_periods(_adapt_published(own), sidecar)
    if "rope.periods" not in weights:
        backbone.unverifiable_keys = ["num_heads"]
        weights["rope.periods"] = rope_periods(backbone.rope.head_dim, sidecar.rope_base)
    return Published(weights, others, sidecar.statistics or pretraining_of(source), sidecar.from_exp)


def write_huggingface(backbone: Any, folder: Path, image_size: int, band_names: Sequence[str]) -> None:
    """Write ``model.safetensors`` and ``config.json``; arguments as of :class:`exp.vision.backbones.base.Backbone`."""
    tensors = _transformers_tensors(backbone.state_dict(), backbone.size.gated)
    write_atomically(folder / "model.safetensors", save(tensors, {"format": "pt"}))
    write_json(folder / "config.json", _transformers_config(backbone, band_names, image_size))


def _transformers_tensors(state: Mapping[str, torch.Tensor], gated: bool) -> dict[str, torch.Tensor]:
    """The tensors of transformers' ``model.safetensors``.

    Args:
        state: of :class:`exp.vision.backbones.vit.VisionTransformer`.
        gated: whether its feed-forward layers are gated.

    Returns:
        Contiguous tensors by name, without the periods of the rotary embedding, which transformers computes, and with a
        mask token of zeros, which only pretraining uses.
    """
    tensors = {"embeddings.mask_token": torch.zeros_like(state["cls_token"])}
    for key, value in state.items():
        key = f".{key}"
        for exp_name, published_names in {**_NAMES, **_MLP_NAMES[gated]}.items():
            key = key.replace(exp_name, published_names[0])
        block, packed, kind = key[1:].partition(".attn.qkv.")
        if packed:
            tensors.update({f"{block}.attention.{name}_proj.{kind}": part.clone()
                          for name, part in zip("qkv", value.chunk(3)) if (name, kind) != ("k", "bias")})  # fmt: skip
        elif not key.endswith("periods"):
            tensors[key[1:]] = value.contiguous()
    return tensors


def _transformers_config(backbone: Any, band_names: Sequence[str], image_size: int) -> dict[str, Any]:
    """Content of ``config.json``.

    Args:
        backbone: an :class:`exp.vision.backbones.vit.VisionTransformer`; periods that are the usual ones, rounded,
            are written as the usual base.
        band_names: of the image's channels, if known; transformers does not read them.
        image_size: side of the training images in pixels; the backbone takes other sizes, too.
    """
    size, periods = backbone.size, backbone.rope.periods
    default_periods = rope_periods(4 * len(periods)).to(periods)
    base = ROPE_BASE if torch.allclose(periods, default_periods, rtol=1e-2) else float(periods[1]) ** len(periods)
    return {
        "architectures": ["DINOv3ViTModel"], "model_type": _MODEL_TYPE, "torch_dtype": "float32",
        "hidden_size": size.embed_dim, "intermediate_size": size.hidden_dim, "num_hidden_layers": size.depth,
        "num_attention_heads": size.num_heads, "num_register_tokens": size.storage_tokens, "use_gated_mlp": size.gated,
        "hidden_act": "silu" if size.gated else "gelu", "patch_size": backbone.patch_size,
        "num_channels": backbone.patch_embed.proj.in_channels, "band_names": list(band_names), "image_size": image_size,
        "layer_norm_eps": NORM_EPS, "rope_theta": base,
        "query_bias": True, "key_bias": False, "value_bias": True, "proj_bias": True, "mlp_bias": True,
    }  # fmt: skip
