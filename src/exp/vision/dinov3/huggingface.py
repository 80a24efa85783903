"""Write a DINOv3 backbone for transformers: the names and files of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import torch
from safetensors.torch import load_file, save

from exp.runs.files import write_atomically, write_json
from exp.vision.dinov3.backbone import NORM_EPS, ROPE_BASE, VisionTransformer, rope_periods
from exp.vision.dinov3.weights import MLP_NAMES, MODEL_TYPE, NAMES, adapt_published, read_sidecar_config, with_periods
from exp.vision.export import relative_difference

__all__ = ["model_config", "processor_config", "transformers_tensors", "write_backbone"]


def write_backbone(model: Any, folder: Path, image: torch.Tensor, say: Callable[[str], None]) -> float:
    """Write the backbone of a model for transformers, read it like any other weights, and compare.

    Args:
        model: an :class:`exp.vision.dinov3.base.ImageModel` without low-rank updates.
        folder: is made.
        image: (B, C, H, W), 0..255, for the comparison.
        say: shows a line.

    Returns:
        The largest difference of the tokens, divided by the largest token.
    """
    backbone, side = model.backbone, image.shape[-1]
    folder.mkdir(exist_ok=True)
    path = folder / "model.safetensors"
    tensors = transformers_tensors(backbone.state_dict(), backbone.size.gated)
    write_atomically(path, save(tensors, {"format": "pt"}))
    write_json(folder / "config.json", model_config(backbone, model.band_names, side))
    mean, std = (values.flatten().tolist() for values in (model.pixel_mean, model.pixel_std))
    write_json(folder / "preprocessor_config.json", processor_config(mean, std, side))

    sidecar = read_sidecar_config(path)
    loaded = VisionTransformer(backbone.size, image.shape[1], model.config).eval()
    state = with_periods(adapt_published(load_file(str(path))), sidecar)
    loaded.load_state_dict(state, strict=False)  # without updates
    assert sidecar.statistics is not None
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in sidecar.statistics)
    pixels = (image.float() - mean) / std
    expected = _tokens(backbone, (image.float() - model.pixel_mean) / model.pixel_std)
    if not torch.equal(backbone.rope.periods, loaded.rope.periods):
        say(
            "export: Hugging Face's form has no periods of the rotary embedding; those of the weights are rounded "
            "otherwise than transformers computes them, which moves features by "
            f"{relative_difference(_tokens(loaded, pixels), expected):.2g} of the largest"
        )
        loaded.rope = backbone.rope  # what else differs is an error
    return relative_difference(_tokens(loaded, pixels), expected)


def _tokens(backbone: VisionTransformer, pixels: torch.Tensor) -> torch.Tensor:
    (features,) = backbone(pixels)
    return torch.cat([features.cls.unsqueeze(1), features.patches.flatten(1, 2)], dim=1)


def transformers_tensors(state: Mapping[str, torch.Tensor], gated: bool) -> dict[str, torch.Tensor]:
    """The tensors of transformers' ``model.safetensors``.

    Args:
        state: of :class:`exp.vision.dinov3.backbone.VisionTransformer`, without low-rank updates.
        gated: whether its feed-forward layers are gated.

    Returns:
        Contiguous tensors by name, without the periods of the rotary embedding, which transformers computes, and with a
        mask token of zeros, which only pretraining uses.
    """
    tensors = {"embeddings.mask_token": torch.zeros_like(state["cls_token"])}
    for key, value in state.items():
        key = f".{key}"
        for exp_name, published_names in {**NAMES, **MLP_NAMES[gated]}.items():
            key = key.replace(exp_name, published_names[0])
        block, packed, kind = key[1:].partition(".attn.qkv.")
        if packed:
            tensors.update({f"{block}.attention.{name}_proj.{kind}": part.clone()
                          for name, part in zip("qkv", value.chunk(3)) if (name, kind) != ("k", "bias")})  # fmt: skip
        elif not key.endswith("periods"):
            tensors[key[1:]] = value.contiguous()
    return tensors


def model_config(backbone: Any, band_names: Sequence[str], image_size: int) -> dict[str, Any]:
    """Content of ``config.json``.

    Args:
        backbone: an :class:`exp.vision.dinov3.backbone.VisionTransformer`; periods that are the usual ones, rounded,
            are written as the usual base.
        band_names: of the image's channels, if known; transformers does not read them.
        image_size: side of the training images in pixels; the backbone takes other sizes, too.
    """
    size, periods = backbone.size, backbone.rope.periods
    default_periods = rope_periods(4 * len(periods)).to(periods)
    base = ROPE_BASE if torch.allclose(periods, default_periods, rtol=1e-2) else float(periods[1]) ** len(periods)
    return {
        "architectures": ["DINOv3ViTModel"], "model_type": MODEL_TYPE, "torch_dtype": "float32",
        "hidden_size": size.embed_dim, "intermediate_size": size.hidden_dim, "num_hidden_layers": size.depth,
        "num_attention_heads": size.num_heads, "num_register_tokens": size.storage_tokens, "use_gated_mlp": size.gated,
        "hidden_act": "silu" if size.gated else "gelu", "patch_size": backbone.patch_size,
        "num_channels": backbone.patch_embed.proj.in_channels, "band_names": list(band_names), "image_size": image_size,
        "layer_norm_eps": NORM_EPS, "rope_theta": base,
        "query_bias": True, "key_bias": False, "value_bias": True, "proj_bias": True, "mlp_bias": True,
    }  # fmt: skip


def processor_config(mean: Sequence[float], std: Sequence[float], image_size: int) -> dict[str, Any]:
    """Content of ``preprocessor_config.json``.

    Args:
        mean: of each channel, 0..255.
        std: standard deviation of each channel, 0..255.
        image_size: height and width, in pixels, to which images are scaled.
    """
    return {
        "image_processor_type": "DINOv3ViTImageProcessor", "do_resize": True,
        "size": {"height": image_size, "width": image_size}, "do_rescale": True, "rescale_factor": 1 / 255,
        "do_normalize": True, "image_mean": [value / 255 for value in mean],
        "image_std": [value / 255 for value in std],
    }  # fmt: skip
