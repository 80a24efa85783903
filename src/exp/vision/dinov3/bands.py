"""The patch embedding of published weights, which see red, green and blue, for other bands.

An image whose bands are all the same has the embedding that it has as a gray picture: kernels are multiplied by 3 / C.
"""

from __future__ import annotations

from typing import Sequence

import torch

from exp.config.explain import nearest
from exp.errors import ConfigError
from exp.vision.data.bands import colors_in

__all__ = ["check_band_init", "embedded", "statistics_for"]

_BAND_INITS = ("auto", "mean", "named")


def check_band_init(band_init: str, names: Sequence[str]) -> None:
    """Refuse a way of beginning that bands with these names do not allow.

    Raises:
        ConfigError: it is unknown, or must know which bands are red, green and blue.
    """
    if band_init not in _BAND_INITS:
        raise ConfigError(
            f"model.band_init={band_init} is not one of {', '.join(_BAND_INITS)}{nearest(band_init, _BAND_INITS)}"
        )
    if band_init == "named" and None in colors_in(names):
        raise ConfigError(
            "model.band_init=named: no bands of the data are called red, green and blue; name all bands of the files "
            "with data.band_names=[red,green,blue,...], or take model.band_init=mean"
        )


def embedded(weight: torch.Tensor, channels: int, names: Sequence[str], band_init: str, source: object) -> torch.Tensor:
    """Kernels for the bands of a model.

    Args:
        weight: of the file, (D, c, p, p); with c = 3 for red, green and blue.
        channels: of the model (C).
        names: of its bands; empty: not known.
        band_init: ``mean``: every band gets the mean of all kernels; ``named``: red, green and blue get their own, the
            others the mean; ``auto``: ``named`` where red, green and blue are among the names, else ``mean``, and as
            many bands as the weights have stay as they are.
        source: of the weights, for messages.

    Returns:
        (D, C, p, p).

    Raises:
        ConfigError: the weights are not those of red, green and blue, and this wants them.
    """
    own, places = weight.shape[1], colors_in(names)
    if band_init == "named" and own != 3:
        raise ConfigError(
            f"model.band_init=named: {source} has {own} channels, of which red, green and blue are not known; take "
            "model.band_init=mean"
        )
    by_name = band_init != "mean" and own == 3 and None not in places
    if band_init == "auto" and not by_name and channels == own:
        return weight
    made = weight.mean(dim=1, keepdim=True).expand(-1, channels, -1, -1).clone()
    for color, place in enumerate(places if by_name else ()):
        assert place is not None
        made[:, place] = weight[:, color]
    return made * (own / channels)


def statistics_for(values: torch.Tensor, channels: int, names: Sequence[str]) -> torch.Tensor:
    """Means or deviations of red, green and blue for the bands of a model: by name, where these are known.

    Args:
        values: (3,).
        channels: of the model (C).
        names: of its bands; empty: not known.

    Returns:
        (C,): what stands for no color has the mean of the three.
    """
    places = colors_in(names)
    if None in places:
        return values if channels == 3 else values.mean().expand(channels)
    made = values.mean().repeat(channels)
    for color, place in enumerate(places):
        assert place is not None
        made[place] = values[color]
    return made
