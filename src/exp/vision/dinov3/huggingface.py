"""The JSON files beside weights of transformers (DINOv3ViTModel) and of timm: tensors do not tell all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

import torch

from exp.errors import ConfigError
from exp.vision.dinov3.blocks import NORM_EPS, ROPE_BASE, rope_periods

__all__ = ["Beside", "beside", "model_config", "processor_config"]

_MODEL_TYPE = "dinov3_vit"


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
        activation = "silu" if config.get("use_gated_mlp") else "gelu"
        wanted = {"model_type": _MODEL_TYPE, "layer_norm_eps": NORM_EPS, "hidden_act": activation}
        other = [f"{key}={config[key]}" for key, value in wanted.items() if config.get(key, value) != value]
        of_timm = {f"image_{key}": value for key, value in config.get("pretrained_cfg", {}).items()}
        statistics = _statistics(processor) or _statistics(of_timm)
        rope = config.get("rope_parameters") or config
        heads, base = int(config.get("num_attention_heads", 0)), float(rope.get("rope_theta", ROPE_BASE))
    except (AttributeError, TypeError, ValueError, OSError) as error:
        raise ConfigError(
            f"init_from: {' or '.join(file.name for file in files)} beside {source} cannot be read ({error}); put the "
            "weights where they have their own"
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
    factor = float(processor.get("rescale_factor", 1 / 255))
    mean, std = ([float(value) / factor for value in processor[key]] for key in ("image_mean", "image_std"))
    return mean, std


def model_config(backbone: Any, band_names: Sequence[str], image_size: int) -> dict[str, Any]:
    """``config.json``.

    Args:
        backbone: an :class:`exp.vision.dinov3.backbone.VisionTransformer`; rounded periods of its rotary embedding
            count as what they were rounded from.
        band_names: of the image's channels, as far as they are known: transformers does not read them.
        image_size: that it was trained at; others go in, too.
    """
    size, periods = backbone.size, backbone.rope.periods
    usual = rope_periods(4 * len(periods)).to(periods)
    base = ROPE_BASE if torch.allclose(periods, usual, rtol=1e-2) else float(periods[1]) ** len(periods)
    return {
        "architectures": ["DINOv3ViTModel"], "model_type": _MODEL_TYPE, "torch_dtype": "float32",
        "hidden_size": size.embed_dim, "intermediate_size": size.hidden_dim, "num_hidden_layers": size.depth,
        "num_attention_heads": size.num_heads, "num_register_tokens": size.storage_tokens, "use_gated_mlp": size.gated,
        "hidden_act": "silu" if size.gated else "gelu", "patch_size": backbone.patch_size,
        "num_channels": backbone.patch_embed.proj.in_channels, "band_names": list(band_names), "image_size": image_size,
        "layer_norm_eps": NORM_EPS, "rope_theta": base,
        "query_bias": True, "key_bias": False, "value_bias": True, "proj_bias": True, "mlp_bias": True,
    }  # fmt: skip


def processor_config(mean: Sequence[float], std: Sequence[float], image_size: int) -> dict[str, Any]:
    """``preprocessor_config.json``.

    Args:
        mean: of each channel, of values in 0..255.
        std: likewise.
        image_size: images are scaled to, height and width.
    """
    return {
        "image_processor_type": "DINOv3ViTImageProcessor", "do_resize": True,
        "size": {"height": image_size, "width": image_size}, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [value / 255 for value in mean],
        "image_std": [value / 255 for value in std],
    }  # fmt: skip
