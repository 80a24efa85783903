"""Pictures of forecasts beside the history and the truth."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import numpy as np
import pandas as pd
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

from exp.data.fingerprint import shortened
from exp.draw.figure import label, literal_text, new_figure, title_and_legend
from exp.errors import ConfigError
from exp.forecasting.intervals import Interval, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Forecast", "draw_forecast", "split_channels"]

_MAX_HISTORY_HORIZONS = 3  # most history that is drawn, in horizons
_INTERVAL_COLORS = ("#ffc48a", "#ffe3c7", "#fff3e6")  # from the narrowest on; opaque, so that each keeps its color
_MAX_NAME_BYTES = 80  # bytes of a file name
_UNSAFE_CHARS = re.compile(r"[^\w.+-]+")


class Forecast(NamedTuple):
    """One window, in the units of the file.

    Attributes:
        title: title of its plots.
        history: (L, C).
        forecast: (H, C).
        truth: (H, C); None: not known yet.
        dates: of the L + H rows; None: the file has no dates.
        intervals: around the forecast, (H, C) each, ascending.
    """

    title: str
    history: np.ndarray
    forecast: np.ndarray
    truth: np.ndarray | None
    dates: pd.DatetimeIndex | None
    intervals: Sequence[Interval] = ()


def split_channels(names: Sequence[str], channels_key: Any, per_page: int) -> dict[str, list[int]]:
    """Distribute the channels of a window over pictures.

    Args:
        names: names of the C series.
        channels_key: ``task.channels``: ``all``, names or numbers (from 0) of series; None: the first ``per_page``.
        per_page: ``task.max_channels``, the channels of a picture.

    Returns:
        The positions of each picture's channels, by a name for its file.

    Raises:
        ConfigError: a channel does not exist.
    """
    chosen = list(range(len(names)))[: per_page if channels_key is None else None]
    if channels_key not in (None, "all"):
        positions = {str(number): number for number in range(len(names))}
        positions.update((name, number) for number, name in reversed(list(enumerate(names))))
        requested = [str(name) for name in ([channels_key] if isinstance(channels_key, (str, int)) else channels_key)]
        unknown = [name for name in requested if name not in positions]
        if unknown:
            raise ConfigError(f"task.channels: no series {unknown[0]} in {shortened(names, 20)}; use these, or all")
        chosen = list(dict.fromkeys(positions[name] for name in requested))
    pages_by_name: dict[str, list[int]] = {}
    for first in range(0, len(chosen), per_page):
        channels = chosen[first : first + per_page]
        name = "_".join(_UNSAFE_CHARS.sub("-", names[channel]) for channel in channels)
        if len(name.encode()) > _MAX_NAME_BYTES or name.lower() in map(str.lower, pages_by_name):
            name = f"channels_{'-'.join(map(str, dict.fromkeys((channels[0], channels[-1]))))}"
        pages_by_name[name] = channels
    return pages_by_name


def draw_forecast(forecast: Forecast, names: Sequence[str], channels: Sequence[int]) -> Figure:
    """Plot history (three horizons at most), truth and forecast, with a panel for each channel.

    Args:
        forecast: all channels of a window.
        names: names of all series.
        channels: positions of the series to draw.
    """
    horizon = len(forecast.forecast)
    num_shown = min(len(forecast.history), _MAX_HISTORY_HORIZONS * horizon)
    dates = forecast.dates
    if dates is None:
        times: Any = list(range(-num_shown, horizon))
    else:  # the local times of the file: matplotlib would convert them to UTC
        times = list(dates[-num_shown - horizon :].tz_localize(None).to_pydatetime())
    figure = new_figure(8, 1.5 * len(channels) + 0.9)
    panels = figure.subplots(len(channels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, channel in zip(panels, channels):
        past = forecast.history[-num_shown:, channel]
        axes.plot(times[:num_shown], past, color="0.55", linewidth=1, label="history")
        if forecast.truth is not None:
            truth = [past[-1], *forecast.truth[:, channel]]
            axes.plot(times[num_shown - 1 :], truth, color="black", linewidth=1.2, label="truth")
        for number, interval in enumerate(reversed(forecast.intervals)):  # the widest first: narrower ones lie on top
            color = _INTERVAL_COLORS[min(len(forecast.intervals) - 1 - number, len(_INTERVAL_COLORS) - 1)]
            style = {"facecolor": color, "edgecolor": "none", "label": f"{percent(interval.level)} %", "zorder": 1}
            axes.fill_between(times[num_shown:], interval.lower[:, channel], interval.upper[:, channel], **style)
        axes.plot(times[num_shown:], forecast.forecast[:, channel], color="tab:orange", linewidth=1.6, label="forecast")
        axes.axvline(times[num_shown], color="0.8", linewidth=0.8)
        literal_text(axes.set_ylabel(label(names[channel])))
        axes.margins(x=0.01)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    title_and_legend(panels[0], forecast.title, columns=4 + len(forecast.intervals))
    if dates is None:
        panels[-1].set_xlabel("time steps from the beginning of the forecast")
    else:
        locator = AutoDateLocator(minticks=3, maxticks=8)
        panels[-1].xaxis.set_major_locator(locator)
        panels[-1].xaxis.set_major_formatter(ConciseDateFormatter(locator))
    figure.align_ylabels()
    return figure
