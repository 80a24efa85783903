"""The patch embedding of published weights, which see red, green and blue, for other bands.

With ``mean`` and ``named`` an image whose bands are all the same has the embedding that it has as a gray picture: that
is why kernels are multiplied by 3 / C. ``repeat`` is what timm's ``adapt_input_conv`` does.
"""

from __future__ import annotations

from typing import Sequence

import torch

from exp.config.explain import nearest
from exp.data.places import shortened
from exp.errors import ConfigError
from exp.vision.data.bands import colors_in

__all__ = ["BAND_INITS", "check_band_init", "embedded", "statistics_for"]

BAND_INITS = ("auto", "mean", "named", "repeat", "zero")


def check_band_init(band_init: str, names: Sequence[str], channels: int) -> None:
    """Refuse a way of beginning that these bands do not allow.

    Args:
        band_init: ``model.band_init``.
        names: of the bands; empty: not known.
        channels: of the model (C).

    Raises:
        ConfigError: it is unknown, or wants to know which bands are red, green and blue.
    """
    if band_init not in BAND_INITS:
        raise ConfigError(
            f"model.band_init={band_init} is not one of {', '.join(BAND_INITS)}{nearest(band_init, BAND_INITS)}"
        )
    if band_init in ("named", "zero") and None in colors_in(names):
        said = f"those of the data are called {shortened(list(names))}" if names else "the data give them no names"
        raise ConfigError(
            f"model.band_init={band_init} must know which of the {channels} bands are red, green and blue, and {said}; "
            "name all bands of the files with data.band_names=[red,green,blue,...], or take model.band_init=mean"
        )


def embedded(weight: torch.Tensor, channels: int, names: Sequence[str], band_init: str, source: object) -> torch.Tensor:
    """Kernels for the bands of a model.

    Args:
        weight: of the file, (D, c, p, p); with c = 3 for red, green and blue.
        channels: of the model (C).
        names: of its bands; empty: not known.
        band_init: ``mean``: every band gets the mean of all kernels; ``named``: red, green and blue get their own, the
            others the mean; ``repeat``: the kernels in turn; ``zero``: red, green and blue get their own as they are,
            the others zeros; ``auto``: ``named`` where red, green and blue are among the names, else ``mean``, and
            as many bands as the weights have stay as they are.
        source: of the weights, for messages.

    Returns:
        (D, C, p, p).

    Raises:
        ConfigError: the weights are not those of red, green and blue, and this wants them.
    """
    own = weight.shape[1]
    places = colors_in(names)
    known = None not in places
    if band_init == "auto":
        band_init = "named" if known and own == 3 else "mean"
        if channels == own and not (known and own == 3):
            return weight
    if band_init in ("named", "zero") and own != 3:
        raise ConfigError(
            f"model.band_init={band_init}: {source} has {own} channels, of which red, green and blue are not known; "
            "take model.band_init=mean"
        )
    mean = weight.mean(dim=1, keepdim=True)
    if band_init == "repeat":
        made = weight[:, [index % own for index in range(channels)]]
    else:
        made = mean.expand(-1, channels, -1, -1).clone()
    if band_init == "zero":
        made.zero_()
    if band_init in ("named", "zero"):
        for color, place in enumerate(places):
            assert place is not None
            made[:, place] = weight[:, color]
    return made.clone() if band_init == "zero" else made * (own / channels)


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
