"""Read checkpoints of the variant with a prior: ``torch.save(model.state_dict())`` of hao405/tb96-xianyan_big.

Checkpoints of the authors' code (github.com/Hank0626/TimeBridge) need no conversion: they have our names. The variant's
have other names, and one MLP per latent where ours are stacked. Its emissions observe the first four channels, with
standard deviation max(s, 0) + 0.1; ours is softplus(s) + 0.1.
"""

from __future__ import annotations

import re
from typing import Mapping

import torch

from exp.models.base import best_prefix

__all__ = ["adapt_variant", "variant_prefix"]

_State = Mapping[str, torch.Tensor]

_LANDMARK = "decoder1_x.1.weight"
_RENAMED = {
    "embedding.": "embedding.",
    "encoder.": "encoder.",
    "decoder.": "decoder.",
    "decoder_x.": "past_decoder.",
    "embedding1.": "scale.embedding.",
    "encoder1.": "scale.encoder.",
    "decoder1.": "scale.decoder.",
    "decoder1_x.": "past_scale.",
    "c_embeddings.": "regime_embedding.",
}
_PRIORS = {
    "encoder_zc.stationary_transition_prior.": "stationary_prior.",
    "encoder_zd.nonstationary_transition_prior.": "changing_prior.",
}
_MLP = re.compile(r"gs\.(\d+)\.net\.(\d+)\.(weight|bias)$")
_REGIME_CHANNELS = 4
_COMPRESSED_ABOVE = 100
# Its softplus is 2e-9, negligible beside 0.1.
_LEAST_SPREAD = -20.0


def variant_prefix(state: _State) -> str | None:
    """The prefix of the variant's names, such as ``model.``; None if these are not its weights."""
    found = [key[: -len(_LANDMARK)] for key in state if key == _LANDMARK or key.endswith(f".{_LANDMARK}")]
    return best_prefix(found) if found else None


def adapt_variant(state: _State, prefix: str) -> dict[str, torch.Tensor]:
    """Rename the variant's weights to the names of :class:`exp.forecasting.timebridge.TimeBridgePrior`.

    Tensors that the variant's forward pass never reads are left out: networks of ``encoder_zc`` and ``encoder_zd``
    other than the transition priors, ``encoder_u.trans``, ``final_mlp``, and the compression below 101 latents.

    Args:
        state: tensors by name.
        prefix: the result of :func:`variant_prefix`.

    Returns:
        All weights and buffers of :class:`~exp.forecasting.timebridge.TimeBridgePrior`. The regimes are not frozen: a
        training that starts from them trains them for ``regime_epochs`` more epochs, then freezes them.
    """
    theirs = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    adapted: dict[str, torch.Tensor] = {"log_variance_shift": torch.zeros(())}
    for path, name in _RENAMED.items():
        adapted.update({name + key[len(path) :]: value for key, value in theirs.items() if key.startswith(path)})
    for path, name in _PRIORS.items():
        prior = {key[len(path) :]: value for key, value in theirs.items() if key.startswith(path)}
        adapted.update({name + key: value for key, value in _stacked(prior).items()})
    if "encoder_u.log_A" in theirs:
        adapted.update(_regimes(theirs))
    return adapted


def _stacked(prior: _State) -> dict[str, torch.Tensor]:
    """Stack the MLPs of all latents, ``gs.<latent>.net.<index>``, and keep the layer that compresses their context."""
    parts: dict[tuple[int, str], dict[int, torch.Tensor]] = {}
    for key, value in prior.items():
        match = _MLP.match(key)
        if match:
            parts.setdefault((int(match.group(2)), match.group(3)), {})[int(match.group(1))] = value
    places = sorted({index for index, _ in parts})  # of the linear layers; activations are between them
    result = {
        f"mlps.layers.{places.index(index)}.{kind}": torch.stack([latents[number] for number in sorted(latents)])
        for (index, kind), latents in parts.items()
    }
    if max((len(latents) for latents in parts.values()), default=0) > _COMPRESSED_ABOVE:
        result.update({key: value for key, value in prior.items() if key.startswith("compress.")})
    return result


def _regimes(theirs: _State) -> dict[str, torch.Tensor]:
    deviations = theirs["encoder_u.observation_stddevs"][:, :_REGIME_CHANNELS].double().clamp_min(0.0)
    learned = {
        "means": theirs["encoder_u.observation_means"][:, :_REGIME_CHANNELS],
        "spreads": torch.log(torch.expm1(deviations)).clamp_min(_LEAST_SPREAD).float(),
        "initial": theirs["encoder_u.log_pi"],
        "transition": theirs["encoder_u.log_A"],
    }
    result = {f"regimes.{name}": value for name, value in learned.items()}
    result.update({f"regimes.frozen_{name}": value.clone() for name, value in learned.items()})
    return {**result, "regimes.frozen": torch.zeros(())}
