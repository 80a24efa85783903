"""Plots of forecasts: history, truth and forecast of some channels over dates, in the units of the file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

from exp.data.places import shortened
from exp.draw.figure import as_it_is, label, new_figure, title_and_legend
from exp.errors import ConfigError
from exp.forecasting.intervals import percent

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure

    from exp.forecasting.intervals import Band

__all__ = ["Forecast", "draw_forecast", "pages"]

_HORIZONS = 3  # most history that is drawn, in horizons
_BANDS = ("#ffc48a", "#ffe3c7", "#fff3e6")  # from the narrowest interval on; opaque, so that each keeps its own color
_LONGEST_NAME = 80  # bytes of a file name
_UNSAFE = re.compile(r"[^\w.+-]+")


class Forecast(NamedTuple):
    """One window, in the units of the file.

    Attributes:
        title: title of its plots.
        history: (L, C).
        forecast: (H, C).
        truth: (H, C); None: not known yet.
        dates: of the L + H rows; None: the file has no dates.
        bands: intervals around the forecast, (H, C) each, ascending.
    """

    title: str
    history: np.ndarray
    forecast: np.ndarray
    truth: np.ndarray | None
    dates: pd.DatetimeIndex | None
    bands: Sequence[Band] = ()


def pages(names: Sequence[str], wanted: Any, most: int) -> dict[str, list[int]]:
    """Distribute the channels of a window over pictures.

    Args:
        names: names of the C series.
        wanted: ``task.channels``: ``all``, names or numbers (from 0) of series; None: the first ``most``.
        most: ``task.max_channels``, the channels of a picture.

    Returns:
        The positions of each picture's channels, by a name for its file.

    Raises:
        ConfigError: a channel does not exist.
    """
    chosen = list(range(len(names)))
    if wanted is None:
        chosen = chosen[:most]
    elif wanted != "all":
        by_name = {name: number for number, name in reversed(list(enumerate(names)))}
        chosen = []
        number: Any
        for each in [wanted] if isinstance(wanted, (str, int)) else wanted:
            number = by_name.get(str(each), each)
            if number not in range(len(names)):
                raise ConfigError(f"task.channels: no series {each} in {shortened(names, 20)}; use these, or all")
            chosen += [number] * (number not in chosen)
    found: dict[str, list[int]] = {}
    for first in range(0, len(chosen), most):
        channels = chosen[first : first + most]
        name = "_".join(_UNSAFE.sub("-", names[channel]) for channel in channels)
        if len(name.encode()) > _LONGEST_NAME or name.lower() in map(str.lower, found):
            name = f"channels_{'-'.join(map(str, dict.fromkeys((channels[0], channels[-1]))))}"
        found[name] = channels
    return found


def draw_forecast(forecast: Forecast, names: Sequence[str], channels: Sequence[int]) -> Figure:
    """Plot history (three horizons at most), truth and forecast, with a panel for each channel.

    Args:
        forecast: all channels of a window.
        names: names of all series.
        channels: positions of the series to draw.
    """
    horizon = len(forecast.forecast)
    shown = min(len(forecast.history), _HORIZONS * horizon)
    dates = forecast.dates
    if dates is None:
        times: Any = list(range(-shown, horizon))
    else:  # the local times of the file: matplotlib would convert them to UTC
        times = list(dates[-shown - horizon :].tz_localize(None).to_pydatetime())
    figure = new_figure(8, 1.5 * len(channels) + 0.9)
    panels = figure.subplots(len(channels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, channel in zip(panels, channels):
        past = forecast.history[-shown:, channel]
        axes.plot(times[:shown], past, color="0.55", linewidth=1, label="history")
        if forecast.truth is not None:
            known = [past[-1], *forecast.truth[:, channel]]
            axes.plot(times[shown - 1 :], known, color="black", linewidth=1.2, label="truth")
        for number, band in enumerate(reversed(forecast.bands)):  # the widest first, so that narrower ones lie on top
            axes.fill_between(
                times[shown:],
                band.lower[:, channel],
                band.upper[:, channel],
                facecolor=_BANDS[min(len(forecast.bands) - 1 - number, len(_BANDS) - 1)],
                edgecolor="none",
                label=f"{percent(band.level)} %",
                zorder=1,
            )
        axes.plot(times[shown:], forecast.forecast[:, channel], color="tab:orange", linewidth=1.6, label="forecast")
        axes.axvline(times[shown], color="0.8", linewidth=0.8)
        as_it_is(axes.set_ylabel(label(names[channel])))
        axes.margins(x=0.01)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    title_and_legend(panels[0], forecast.title, columns=4 + len(forecast.bands))
    if dates is None:
        panels[-1].set_xlabel("time steps from the beginning of the forecast")
    else:
        locator = AutoDateLocator(minticks=3, maxticks=8)
        panels[-1].xaxis.set_major_locator(locator)
        panels[-1].xaxis.set_major_formatter(ConciseDateFormatter(locator))
    figure.align_ylabels()
    return figure
