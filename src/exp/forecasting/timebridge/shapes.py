"""Which configuration the weights of a TimeBridge tell."""

from __future__ import annotations

from typing import Any, Mapping

import torch

__all__ = ["prior_settings", "timebridge_settings"]

_State = Mapping[str, torch.Tensor]
_LAYERS = "encoder.attn_layers."


def timebridge_settings(state: _State) -> dict[str, Any]:
    """Settings by the configuration's keys; nothing where the embedding or the head is missing.

    The number of heads, the channels and the moving average leave no trace in the shapes.

    Args:
        state: weights by the names of :class:`exp.forecasting.timebridge.TimeBridge`.
    """
    embedding, head = state.get("embedding.proj.0.weight"), state.get("decoder.1.weight")
    if embedding is None or head is None or embedding.dim() != 2 or head.dim() != 2:
        return {}
    d_model, period = embedding.shape
    kinds = {"integrated": 0, "downsampling": 0, "cointegrated": 0}
    patches, patches_out = None, head.shape[1] // d_model
    settings: dict[str, Any] = {"model.d_model": d_model, "model.period": period}
    for index in sorted({int(key[len(_LAYERS) :].split(".")[0]) for key in state if key.startswith(_LAYERS)}):
        layer = f"{_LAYERS}{index}."
        conv = state.get(f"{layer}conv1.weight")
        across = f"{layer}attention1.q_proj.weight" in state
        kinds["downsampling" if conv is not None else "cointegrated" if across else "integrated"] += 1
        if conv is not None and patches is None:
            patches = conv.shape[1]
        if f"{layer}fc1.weight" in state:
            settings["model.d_ff"] = state[f"{layer}fc1.weight"].shape[0]
    patches = patches_out if patches is None else patches
    settings.update({f"model.{kind}_layers": count for kind, count in kinds.items()})
    settings["model.num_patches_out"] = None if patches_out == patches else patches_out
    settings.update({"data.lookback": patches * period, "data.horizon": head.shape[0]})
    others = state.get("quantile_decoder.1.weight")
    settings["model.quantiles"] = None if others is None else f"<{others.shape[0] // head.shape[0] + 1} levels>"
    return settings


def prior_settings(state: _State) -> dict[str, Any]:
    """The same for what :class:`exp.forecasting.timebridge.TimeBridgePrior` adds; nothing for weights without it."""
    if "past_decoder.1.weight" not in state:
        return {}
    stationary, changing = (state.get(f"{kind}_prior.mlps.layers.0.weight") for kind in ("stationary", "changing"))
    settings: dict[str, Any] = {"model.prior": stationary is not None or changing is not None}
    latents = {"stationary": 0, "changing": 0}
    for kind, first in (("changing", changing), ("stationary", stationary)):
        if first is not None:
            latents[kind] = first.shape[0]
            layers = [key for key in state if key.startswith(f"{kind}_prior.mlps.layers.") and key.endswith(".weight")]
            settings["model.prior_layers"] = len(layers) - 1
            settings["model.changing_hidden" if kind == "changing" else "model.prior_hidden"] = first.shape[1]
    if settings["model.prior"]:
        settings["data.channels"] = sum(latents.values())
        settings["model.stationary_share"] = latents["stationary"] / sum(latents.values())
    if stationary is not None:
        compress = state.get("stationary_prior.compress.weight")
        settings["model.prior_context"] = None if compress is None else compress.shape[0]
        context = stationary.shape[2] - 1 if compress is None else compress.shape[1]
        settings["model.lags"] = context // latents["stationary"]
    if changing is not None:
        settings["model.regime_embedding"] = changing.shape[2] - 1
    if "regimes.means" in state:
        settings["model.regimes"], settings["model.regime_channels"] = state["regimes.means"].shape
    return settings
