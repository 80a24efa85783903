"""Read DINOv3 weights with the names of the authors, of transformers and of timm.

All three have the same values; only names and the packing of query, key and value differ. Only the authors' files have
the periods of the rotary embedding: transformers and timm compute them in float32, and so do we for their files. What
tensors do not show, such as the number of heads, is in the JSON files beside the weights of transformers and timm.
Every tensor of a backbone is used, known to be unneeded, or refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Mapping, NamedTuple

import torch

from exp.errors import ConfigError
from exp.models.base import best_prefix
from exp.runs.files import read_json
from exp.vision.dinov3.backbone import NORM_EPS, ROPE_BASE, SIZES, rope_periods

__all__ = ["HEAD", "MLP_NAMES", "MODEL_TYPE", "NAMES", "SidecarConfig", "adapt_published", "check_backbone",
           "pretraining_of", "published_prefix", "read_sidecar_config", "refuse_convnext", "with_periods"]  # fmt: skip

_State = Mapping[str, torch.Tensor]
MODEL_TYPE = "dinov3_vit"

NAMES = {
    ".blocks.": (".layer.",), ".patch_embed.proj.": (".embeddings.patch_embeddings.",),
    ".cls_token": (".embeddings.cls_token",), ".storage_tokens": (".embeddings.register_tokens", ".reg_token"),
    ".attn.proj.": (".attention.o_proj.",), ".rope.periods": (".rope_embed.periods",),
    ".ls1.gamma": (".layer_scale1.lambda1", ".gamma_1"), ".ls2.gamma": (".layer_scale2.lambda1", ".gamma_2"),
}  # fmt: skip
"""Parts of names, each with a leading dot: ours -> those of transformers and timm (of the periods: the authors')."""
MLP_NAMES: dict[bool, dict[str, tuple[str, ...]]] = {
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
HEAD = re.compile(r"(?:\w*head\w*|classifier|fc|fc_norm|neck|decoder)\.")
"""Published names of tensors that belong to a head, beside those of a backbone without prefix."""


def adapt_published(state: _State) -> dict[str, torch.Tensor]:
    """Published weights under the names of :class:`exp.vision.dinov3.backbone.VisionTransformer`.

    Args:
        state: tensors by name, with the names of the authors, transformers or timm.

    Returns:
        The weights of the backbone, with zeros for biases that a file leaves out because they are zero.
    """
    gated = any(re.search(r"mlp\.(w1|gate_proj|fc1_g)\.", key) for key in state)
    renamed = {old: new for new, names in {**NAMES, **MLP_NAMES[gated]}.items() for old in names}
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


def published_prefix(state: _State) -> str | None:
    """The prefix of the names of a published backbone, such as ``backbone.`` or ``teacher.backbone.``.

    Returns:
        An empty string for a backbone without prefix; None if there is no backbone. For several backbones see
        :func:`exp.models.base.best_prefix`.
    """
    prefixes = [match.group(1) for match in map(_LANDMARK.match, state) if match]
    return best_prefix(prefixes) if prefixes else None


def with_periods(state: _State, sidecar: SidecarConfig) -> dict[str, torch.Tensor]:
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


def _infer_keys(state: _State) -> tuple[dict[str, Any], int]:
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


def refuse_convnext(state: _State, source: Path) -> None:
    """Refuse the weights of a ConvNeXt, in the names of the authors, transformers or timm.

    Raises:
        ConfigError: a tensor is that of a ConvNeXt.
    """
    if any(map(_CONVNEXT.search, state)):
        raise ConfigError(
            f"init_from: {source} holds a ConvNeXt; the backbones here are DINOv3's ViTs, such as dinov3_vits16"
        )


def check_backbone(state: _State, model_state: _State, source: Path) -> None:
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
            " ".join(f"model.{key}={'null' if keys.get(key) is None else keys[key]}" for key in differing)
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
    files = [source.parent / name for name in ("config.json", "preprocessor_config.json")]
    try:
        config, processor = (read_json(file) if file.is_file() else {} for file in files)
        activation = "silu" if config.get("use_gated_mlp") else "gelu"
        expected = {"model_type": MODEL_TYPE, "layer_norm_eps": NORM_EPS, "hidden_act": activation}
        differing = [f"{key}={config[key]}" for key, value in expected.items() if config.get(key, value) != value]
        timm_processor = {f"image_{key}": value for key, value in config.get("pretrained_cfg", {}).items()}
        statistics = _statistics(processor) or _statistics(timm_processor)
        rope = config.get("rope_parameters") or config
        heads, base = int(config.get("num_attention_heads", 0)), float(rope.get("rope_theta", ROPE_BASE))
    except (AttributeError, TypeError, ValueError, ConfigError, OSError) as error:
        raise ConfigError(
            f"init_from: {' or '.join(file.name for file in files)} beside {source} cannot be read ({error}); put the "
            "weights where they have their own"
        ) from error
    if differing:
        raise ConfigError(
            f"init_from: {source} holds another model, as {files[0].name} beside it says ({', '.join(differing)}); the "
            f"backbones here are DINOv3's ViTs ({MODEL_TYPE})"
        )
    return SidecarConfig(heads, base, statistics, from_exp="band_names" in config)


def _statistics(processor: Mapping[str, Any]) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation, 0..255, of a processor that rescales pixels before it normalizes them."""
    factor = float(processor.get("rescale_factor", 1 / 255)) if processor.get("do_rescale", True) else 1.0
    if not processor.get("do_normalize", True):
        return [0.0] * 3, [1.0 / factor] * 3
    if "image_mean" not in processor or "image_std" not in processor:
        return None
    mean, std = ([float(value) / factor for value in processor[key]] for key in ("image_mean", "image_std"))
    return mean, std
