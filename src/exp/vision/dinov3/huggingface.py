"""A backbone in the form of Hugging Face's transformers (DINOv3ViTModel): writes it, the way back of ``weights.py``.

Also reads what stands beside published tensors, whose names and shapes do not tell all.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

import torch

from exp.errors import ConfigError
from exp.vision.dinov3.blocks import NORM_EPS, ROPE_BASE, rope_periods
from exp.vision.dinov3.sizes import Size

__all__ = ["Beside", "beside", "model_config", "model_tensors", "processor_config"]

_MODEL_TYPE = "dinov3_vit"

_RENAMED = [
    (r"^patch_embed\.proj\.", "embeddings.patch_embeddings."),
    (r"^cls_token$", "embeddings.cls_token"),
    (r"^storage_tokens$", "embeddings.register_tokens"),
    (r"^blocks\.", "layer."),
    (r"\.attn\.proj\.", ".attention.o_proj."),
    (r"\.ls([12])\.gamma$", r".layer_scale\1.lambda1"),
]
_FEED_FORWARD = {
    True: [(r"\.mlp\.w1\.", ".mlp.gate_proj."), (r"\.mlp\.w2\.", ".mlp.up_proj."), (r"\.mlp\.w3\.", ".mlp.down_proj.")],
    False: [(r"\.mlp\.fc1\.", ".mlp.up_proj."), (r"\.mlp\.fc2\.", ".mlp.down_proj.")],
}
_PACKED = re.compile(r"^layer\.(\d+)\.attn\.qkv\.(weight|bias)$")


class Beside(NamedTuple):
    """What ``config.json`` and ``preprocessor_config.json`` say of the weights that they stand beside.

    Attributes:
        num_heads: attention heads; 0: they do not say.
        rope_base: the base of the rotary embedding's periods.
        statistics: mean and standard deviation of each channel, of values in 0..255; None: they do not say.
        ours: whether ``task=export`` has written them: their channels are bands of the data, in their order.
    """

    num_heads: int = 0
    rope_base: float = ROPE_BASE
    statistics: tuple[list[float], list[float]] | None = None
    ours: bool = False


def beside(source: Path) -> Beside:
    """What stands beside a ``.safetensors``, as transformers and timm write it; nothing beside other files.

    Raises:
        ConfigError: it is of another model, or cannot be read.
    """
    if ".safetensors" not in source.name:
        return Beside()
    files = [source.parent / name for name in ("config.json", "preprocessor_config.json")]
    try:
        config, processor = (json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {} for file in files)
        told: dict[str, Any] = {"model_type": config.get("model_type", _MODEL_TYPE)}
        known: dict[str, Any] = {"model_type": _MODEL_TYPE}
        if "model_type" in config:
            known.update(layer_norm_eps=NORM_EPS, hidden_act="silu" if config.get("use_gated_mlp") else "gelu")
            told.update({key: config[key] for key in known if key in config})
        other = [f"{key}={value}" for key, value in told.items() if value != known[key]]
        rope = config.get("rope_parameters") or config
        of_timm = config.get("pretrained_cfg") or {}
        statistics = _statistics(processor) or _statistics(
            {f"image_{key}": of_timm[key] for key in ("mean", "std") if key in of_timm}
        )
        heads, base = int(config.get("num_attention_heads", 0)), float(rope.get("rope_theta", ROPE_BASE))
    except (AttributeError, TypeError, ValueError, OSError) as error:
        names = " or ".join(file.name for file in files)
        raise ConfigError(
            f"init_from: {names} beside {source} cannot be read ({error}); put the weights where they have their own"
        ) from error
    if other:
        raise ConfigError(
            f"init_from: {source} holds another model, as {files[0].name} beside it says ({', '.join(other)}); the "
            f"backbones here are DINOv3's ViTs ({_MODEL_TYPE})"
        )
    return Beside(heads, base, statistics, ours="band_names" in config)


def _statistics(processor: Mapping[str, Any]) -> tuple[list[float], list[float]] | None:
    """Of a processor that multiplies values of 0..255 by a factor, takes off a mean, and divides by a deviation."""
    if "image_mean" not in processor or "image_std" not in processor:
        return None
    factor = float(processor.get("rescale_factor", 1 / 255)) if processor.get("do_rescale", True) else 1.0
    mean, std = ([float(value) for value in processor[key]] for key in ("image_mean", "image_std"))
    if not processor.get("do_normalize", True):
        mean, std = [0.0] * len(mean), [1.0] * len(std)
    return [value / factor for value in mean], [value / factor for value in std]


def model_tensors(state: Mapping[str, torch.Tensor], gated: bool) -> dict[str, torch.Tensor]:
    """The tensors of ``model.safetensors``.

    Args:
        state: of :class:`exp.vision.dinov3.backbone.VisionTransformer`, without low-rank updates.
        gated: whether its feed-forward parts are.

    Returns:
        Tensors by name, contiguous. The periods of the rotary embedding are left out, which transformers computes; a
        mask token, which only pretraining uses, is zero.
    """
    renames = [(re.compile(pattern), name) for pattern, name in (*_RENAMED, *_FEED_FORWARD[gated])]
    found = {"embeddings.mask_token": torch.zeros_like(state["cls_token"])}
    for key, value in state.items():
        if key == "rope.periods":
            continue
        for pattern, name in renames:
            key = pattern.sub(name, key)
        packed = _PACKED.match(key)
        if packed is None:
            found[key] = value.contiguous()
            continue
        block, kind = packed.groups()
        for name, part in zip("qkv", value.chunk(3)):
            if (name, kind) != ("k", "bias"):  # keys have none
                found[f"layer.{block}.attention.{name}_proj.{kind}"] = part.clone()
    return found


def model_config(
    size: Size, patch_size: int, band_names: Sequence[str], channels: int, image_size: int, layer_scale: float,
    periods: torch.Tensor,
) -> dict[str, Any]:  # fmt: skip
    """``config.json``.

    Args:
        size: of the backbone.
        patch_size: pixels along a patch.
        band_names: of the image's channels, as far as they are known: transformers does not read them.
        channels: of the image.
        image_size: that it was trained at; others go in, too.
        layer_scale: initial value; of a model that is made anew.
        periods: of the rotary embedding; rounded ones count as what they were rounded from.
    """
    usual = rope_periods(4 * len(periods)).to(periods)
    base = ROPE_BASE if torch.allclose(periods, usual, rtol=1e-2) else float(periods[1]) ** len(periods)
    return {
        "architectures": ["DINOv3ViTModel"],
        "model_type": _MODEL_TYPE,
        "hidden_size": size.embed_dim,
        "intermediate_size": size.hidden_dim,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.num_heads,
        "num_register_tokens": size.storage_tokens,
        "use_gated_mlp": size.gated,
        "hidden_act": "silu" if size.gated else "gelu",
        "patch_size": patch_size,
        "num_channels": channels,
        "band_names": list(band_names),
        "image_size": image_size,
        "layer_norm_eps": NORM_EPS,
        "rope_theta": base,
        "layerscale_value": layer_scale,
        "query_bias": True,
        "key_bias": False,
        "value_bias": True,
        "proj_bias": True,
        "mlp_bias": True,
        "torch_dtype": "float32",
    }


def processor_config(mean: Sequence[float], std: Sequence[float], image_size: int) -> dict[str, Any]:
    """``preprocessor_config.json``.

    Args:
        mean: of each channel, of values in 0..255.
        std: likewise.
        image_size: images are scaled to, height and width.
    """
    return {
        "image_processor_type": "DINOv3ViTImageProcessor",
        "do_resize": True,
        "size": {"height": image_size, "width": image_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [value / 255 for value in mean],
        "image_std": [value / 255 for value in std],
    }
