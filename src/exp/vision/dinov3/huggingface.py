"""Writes a backbone in the form of Hugging Face's transformers (DINOv3ViTModel): the way back of ``weights.py``."""

from __future__ import annotations

import re
from typing import Any, Mapping, Sequence

import torch

from exp.vision.dinov3.blocks import NORM_EPS
from exp.vision.dinov3.sizes import Size

__all__ = ["model_config", "model_tensors", "processor_config"]

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


def model_config(size: Size, patch_size: int, channels: int, image_size: int, layer_scale: float) -> dict[str, Any]:
    """``config.json``.

    Args:
        size: of the backbone.
        patch_size: pixels along a patch.
        channels: of the image.
        image_size: that it was trained at; others go in, too.
        layer_scale: initial value; of a model that is made anew.
    """
    return {
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        "hidden_size": size.embed_dim,
        "intermediate_size": size.hidden_dim,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.num_heads,
        "num_register_tokens": size.storage_tokens,
        "use_gated_mlp": size.gated,
        "hidden_act": "silu" if size.gated else "gelu",
        "patch_size": patch_size,
        "num_channels": channels,
        "image_size": image_size,
        "layer_norm_eps": NORM_EPS,
        "rope_theta": 100.0,
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
