"""The TimeBridge forecaster, and how it reads checkpoints of its variant with a prior (hao405/tb96-xianyan_big).

Checkpoints of the authors' code (github.com/Hank0626/TimeBridge) need no conversion: they have our names. The variant's
have other names, and one MLP per latent where ours are stacked. Its emissions observe the first four channels, with
standard deviation max(s, 0) + 0.1; ours is softplus(s) + 0.1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Mapping

import torch
from torch import nn

from exp.errors import ConfigError
from exp.forecasting.model import Forecaster, in_float32, split_heads
from exp.forecasting.outputs import RawForecast
from exp.forecasting.timebridge import layers
from exp.forecasting.timebridge.keys import TimeBridgeConfig
from exp.forecasting.timebridge.loss import make_loss
from exp.models.base import best_prefix


class TimeBridge(Forecaster):
    """TimeBridge (Liu et al., ICML 2025, arXiv 2410.04442); weights have the names of the authors' code.

    Each series is standardized over the lookback, cut into patches of one period and embedded. Integrated Attention
    works within each channel, Patch Down-sampling shortens the sequence of patches, Cointegrated Attention works across
    channels; a linear head gives the horizon. The time features are further channels. Only Cointegrated Attention mixes
    them with the series, and the head drops them, so without such layers they are not computed.

    Args:
        **keys: of :class:`exp.forecasting.timebridge.keys.TimeBridgeConfig`, which documents them.

    Raises:
        ConfigError: a key is out of range, or keys contradict each other.
    """

    config_class: ClassVar[Any] = TimeBridgeConfig
    default_instance_norm = True

    def __init__(self, **keys: Any) -> None:
        super().__init__(output=keys.get("output"), instance_norm=keys.get("instance_norm"))
        self.config = config = self.config_class(**{**keys, "output": None})
        patches = max(config.lookback // max(config.period, 1), 1)  # as in the authors' code
        patches_out = patches if config.num_patches_out is None else config.num_patches_out
        _check(config, patches, patches_out)
        self.channels = config.channels
        self.unverifiable_keys = ["num_heads", "stable_len"]
        self.uses_time_features = config.cointegrated_layers > 0
        if 0 < config.period < config.lookback and config.lookback % config.period:
            self.messages = [
                f"model.period={config.period} does not divide data.lookback={config.lookback}: as in the authors' "
                f"code, {patches} patches have {config.lookback // patches} time steps each"
            ]

        self.embedding = layers.PatchEmbedding(config.lookback // patches, config.d_model, config.dropout)
        stack: list[nn.Module] = [layers.IntegratedAttention(config) for _ in range(config.integrated_layers)]
        for index in range(config.downsampling_layers):
            stack.append(layers.PatchDownsampling(config, patches if index == 0 else patches_out, patches_out))
        stack += [layers.CointegratedAttention(config) for _ in range(config.cointegrated_layers)]
        self.encoder = layers.Encoder(stack)
        self.token_elements = patches_out * config.d_model
        self.decoder = linear_head(self.token_elements, config.horizon)
        self.point_loss = make_loss(config.loss, config.horizon, config.alpha)
        if self.output.num_others:
            self.output_decoder = linear_head(self.token_elements, self.output.num_others * config.horizon)

    def adapt_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """Rename the weights of the variant to ours; a model without a prior takes the forecaster's weights alone."""
        prefix = variant_prefix(state)
        adapted = super().adapt_state_dict(state, source) if prefix is None else adapt_variant(state, prefix)
        if "past_decoder.1.weight" not in adapted or hasattr(self, "past_decoder"):
            return adapted
        return {key: value for key, value in adapted.items() if key.startswith(("embedding.", "encoder.", "decoder."))}

    def sharded_units(self) -> list[nn.Module]:
        """The layers of all encoders (``wrapper=fsdp``)."""
        encoders = [module for module in self.modules() if isinstance(module, layers.Encoder)]
        return [layer for encoder in encoders for layer in encoder.attn_layers]

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        marks: torch.Tensor,
        y: torch.Tensor | None = None,
        observed: torch.Tensor | None = None,
        mode: str = "tensor",
        **_: Any,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """See :meth:`exp.forecasting.model.Forecaster.forward`.

        Args:
            x: (B, L, C), the lookback.
            marks: (B, L, M), time features in [-0.5, 0.5]; not read without Cointegrated Attention.
            y: (B, H, C), the truth; only for the loss.
            observed: (B, H, C), 1 where ``y`` has a truth, else 0; None: 1 everywhere.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"``.
        """
        return super().forward(x, y, observed, mode, marks=marks)

    def raw_forecast(self, x: torch.Tensor, marks: torch.Tensor) -> RawForecast:  # type: ignore[override]
        """See :meth:`exp.forecasting.model.Forecaster.raw_forecast`; a head gives each number that the output needs."""
        series, mean, std = self.standardize(x)
        tokens = self.encode(series, marks)
        points = in_float32(self.decoder, tokens).transpose(1, 2) * std + mean
        return RawForecast(points, self._others(tokens), std)

    def _others(self, tokens: torch.Tensor) -> torch.Tensor | None:
        if not self.output.num_others:
            return None
        return split_heads(in_float32(self.output_decoder, tokens), self.config.horizon)

    def encode(self, series: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        """Tokens of standardized series.

        Args:
            series: (B, L, C).
            marks: (B, L, M); not read without Cointegrated Attention.

        Returns:
            (B, C, patches, d_model).
        """
        if self.uses_time_features:
            series = torch.cat([series, marks], dim=-1)
        tokens: torch.Tensor = self.encoder(self.embedding(series.transpose(1, 2)))
        return tokens[:, : self.channels]

    def is_new_head(self, name: str) -> bool:
        """Whether weights may be missing in a checkpoint: those of the heads, which depend on the horizon."""
        return name.startswith(("decoder.", "output_decoder."))


def linear_head(tokens: int, steps: int) -> nn.Sequential:
    """A linear layer without bias from all elements of a channel's tokens to time steps."""
    return nn.Sequential(nn.Flatten(-2), nn.Linear(tokens, steps, bias=False))


def _check(config: TimeBridgeConfig, patches: int, patches_out: int) -> None:
    """Refuse contradictory keys for which torch raises no error, or a misleading one."""
    for holds, wrong in (
        (config.lookback >= config.period, f"period={config.period} is longer than lookback={config.lookback}"),
        (config.lookback % patches == 0, f"period={config.period} makes {patches} patches, which do not divide "
                                         f"lookback={config.lookback}"),
        (config.d_model % config.num_heads == 0, f"num_heads={config.num_heads} does not divide "
                                                 f"d_model={config.d_model}"),
        (config.stable_len <= config.d_model, f"stable_len={config.stable_len} is longer than a token, "
                                              f"d_model={config.d_model}"),
        (config.downsampling_layers or patches_out == patches, f"num_patches_out={patches_out} needs "
                                                               f"downsampling_layers; all patches are {patches}"),
    ):  # fmt: skip
        if not holds:
            raise ConfigError(f"model.{wrong}")


_State = Mapping[str, torch.Tensor]

_VARIANT_KEY = "decoder1_x.1.weight"
_VARIANT_PREFIXES = {
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
_VARIANT_PRIORS = {
    "encoder_zc.stationary_transition_prior.": "stationary_prior.",
    "encoder_zd.nonstationary_transition_prior.": "nonstationary_prior.",
}
_MLP = re.compile(r"gs\.(\d+)\.net\.(\d+)\.(weight|bias)$")
_REGIME_CHANNELS = 4
_MAX_UNCOMPRESSED_LATENTS = 100
# Its softplus is 2e-9, negligible beside 0.1.
_MIN_RAW_STD = -20.0


def variant_prefix(state: _State) -> str | None:
    """The prefix of the variant's names, such as ``model.``; None if these are not its weights."""
    prefixes = [key[: -len(_VARIANT_KEY)] for key in state if key == _VARIANT_KEY or key.endswith(f".{_VARIANT_KEY}")]
    return best_prefix(prefixes) if prefixes else None


def adapt_variant(state: _State, prefix: str) -> dict[str, torch.Tensor]:
    """Rename the variant's weights to the names of :class:`exp.forecasting.timebridge.prior.TimeBridgePrior`.

    Tensors that the variant's forward pass never reads are left out: networks of ``encoder_zc`` and ``encoder_zd``
    other than the transition priors, ``encoder_u.trans``, ``final_mlp``, and the compression below 101 latents.

    Args:
        state: tensors by name.
        prefix: the result of :func:`variant_prefix`.

    Returns:
        All weights and buffers of :class:`~exp.forecasting.timebridge.prior.TimeBridgePrior`. The regimes are not
        frozen: a training that starts from them trains them for ``regime_epochs`` more epochs, then freezes them.
    """
    variant = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    adapted: dict[str, torch.Tensor] = {"log_variance_shift": torch.zeros(())}
    for path, name in _VARIANT_PREFIXES.items():
        adapted.update({name + key[len(path) :]: value for key, value in variant.items() if key.startswith(path)})
    for path, name in _VARIANT_PRIORS.items():
        prior = {key[len(path) :]: value for key, value in variant.items() if key.startswith(path)}
        adapted.update({name + key: value for key, value in _stack_mlps(prior).items()})
    if "encoder_u.log_A" in variant:
        adapted.update(_convert_regimes(variant))
    return adapted


def _stack_mlps(prior: _State) -> dict[str, torch.Tensor]:
    """Stack the MLPs of all latents, ``gs.<latent>.net.<index>``, and keep the layer that compresses their context."""
    latents_by_layer: dict[tuple[int, str], dict[int, torch.Tensor]] = {}
    for key, value in prior.items():
        match = _MLP.match(key)
        if match:
            latents_by_layer.setdefault((int(match.group(2)), match.group(3)), {})[int(match.group(1))] = value
    indices = sorted({index for index, _ in latents_by_layer})  # of the linear layers; activations are between them
    stacked = {
        f"mlps.layers.{indices.index(index)}.{kind}": torch.stack([latents[number] for number in sorted(latents)])
        for (index, kind), latents in latents_by_layer.items()
    }
    if max((len(latents) for latents in latents_by_layer.values()), default=0) > _MAX_UNCOMPRESSED_LATENTS:
        stacked.update({key: value for key, value in prior.items() if key.startswith("compress.")})
    return stacked


def _convert_regimes(variant: _State) -> dict[str, torch.Tensor]:
    deviations = variant["encoder_u.observation_stddevs"][:, :_REGIME_CHANNELS].double().clamp_min(0.0)
    learned = {
        "means": variant["encoder_u.observation_means"][:, :_REGIME_CHANNELS],
        "raw_stds": torch.log(torch.expm1(deviations)).clamp_min(_MIN_RAW_STD).float(),
        "initial": variant["encoder_u.log_pi"],
        "transition": variant["encoder_u.log_A"],
    }
    regimes = {f"regimes.{name}": value for name, value in learned.items()}
    regimes.update({f"regimes.frozen_{name}": value.clone() for name, value in learned.items()})
    return {**regimes, "regimes.frozen": torch.zeros(())}
