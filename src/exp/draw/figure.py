"""Pictures and their files: PNG, and beside it the format that a paper wants, in the size that it wants.

Figures with axes are drawn by matplotlib's object interface, without the global state of pyplot.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Iterator, Sequence, Union

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from PIL import Image

if TYPE_CHECKING:
    from exp.config.schema import FiguresConfig

__all__ = [
    "Picture", "as_it_is", "encoded", "figure_file", "figure_pixels", "label", "new_figure", "pixels_png", "resize",
    "title_and_legend", "training_curves",
    "undrawable",
]  # fmt: skip

Picture = Union[Figure, np.ndarray, bytes]
"""A matplotlib figure; pixels, RGB (H, W, 3), uint8; or a PNG file, which is taken as it is."""
_SMALLEST_LETTERS = 6.0  # points, the least that journals print
_THINNEST = 0.6  # of what lines were
_LEGEND_LINE = 1.6  # times the size of its letters
_SMOOTHED_FROM = 60  # readings of the loss
_FALLBACKS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN",
    "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback", "Microsoft YaHei", "SimHei", "PingFang SC",
    "Arial Unicode MS",
)  # fmt: skip
"""Typefaces with the letters that the default one lacks."""

_undrawable: set[str] = set()


def new_figure(width: float, height: float, dpi: int = 110) -> Figure:
    """An empty figure of that size in inches; its canvas needs no display."""
    return Figure(figsize=(width, height), dpi=dpi)


def as_it_is(text: Text) -> Text:
    """Have a text of somebody's, such as the name of a series, drawn letter by letter: ``$`` begins no formula."""
    text.set_parse_math(False)
    return text


def label(text: str) -> str:
    """A label for a legend, which leaves out those that begin with ``_``."""
    return f" {text}" if text.startswith("_") else text


def title_and_legend(axes: Any, title: str, columns: int = 4, size: float = 9) -> None:
    """A title, and below it, above the axes and their curves, a legend of what has a label.

    Args:
        axes: matplotlib's, with everything drawn.
        title: text as it is to be printed; may be empty.
        columns: of the legend, at most.
        size: of its letters in points.
    """
    entries = len(axes.get_legend_handles_labels()[0])
    rows = -(-entries // columns)
    as_it_is(axes.set_title(title, fontsize=size + 1, loc="left", pad=6 + rows * _LEGEND_LINE * size))
    if entries:
        legend = axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncol=min(entries, columns), fontsize=size,
                             frameon=False, borderaxespad=0.1, borderpad=0.2, labelspacing=0.3,
                             columnspacing=1.4, handlelength=1.6)  # fmt: skip
        for text in legend.get_texts():
            as_it_is(text)


def resize(figure: Figure, width: float | None, height: float | None) -> None:
    """Give a complete figure another size. Where it becomes narrower, letters and lines shrink, letters to 6 points.

    Args:
        figure: complete.
        width: in inches; None: in proportion to ``height``, or as it is.
        height: likewise.
    """
    old_width, old_height = figure.get_size_inches()
    if width is None:
        width = old_width if height is None else old_width * height / old_height
    figure.set_size_inches(width, height or old_height * width / old_width)
    factor = min(width / old_width, 1.0)
    axes = [axis for each in figure.axes for axis in (each.xaxis, each.yaxis)]
    ticks = [(axis, axis.get_ticklabels()) for axis in axes]
    for text in figure.findobj(Text):
        size = float(text.get_fontsize())
        text.set_fontsize(max(size * factor, min(size, _SMALLEST_LETTERS)))
    for line in figure.findobj(Line2D):
        line.set_linewidth(line.get_linewidth() * max(factor, _THINNEST))
        line.set_markersize(line.get_markersize() * max(factor, _THINNEST))
    for axis, labels in ticks:  # also those of ticks that are made later
        if labels:
            axis.set_tick_params(labelsize=labels[0].get_fontsize())


def figure_file(figure: Figure, form: str, dpi: float | None = None) -> bytes:
    """The bytes of an image file.

    Letters in PDF are fonts (TrueType, as publishers ask for), in SVG outlines, which need no font. Characters that the
    default typeface, DejaVu Sans, lacks are taken from usual typefaces for Chinese, where one is installed.

    Args:
        figure: complete.
        form: ``png``, ``pdf`` or ``svg``.
        dpi: pixels per inch, of what is no line or letter, too; None: the figure's own.
    """
    buffer = io.BytesIO()
    with _complete(figure), mpl.rc_context({"pdf.fonttype": 42, "svg.fonttype": "path"}):
        # Files of equal figures are equal.
        figure.savefig(buffer, format=form, dpi="figure" if dpi is None else dpi,
                       metadata={"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(form))  # fmt: skip
    return buffer.getvalue()


def figure_pixels(figure: Figure) -> np.ndarray:
    """A complete figure as pixels, at its own dpi: RGB (H, W, 3), uint8."""
    canvas: Any = FigureCanvasAgg(figure)  # whose methods have no types
    with _complete(figure):
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def encoded(picture: Picture, figures: FiguresConfig) -> dict[str, bytes]:
    """The files that ``figures`` of the configuration asks for.

    A figure is drawn in the size and resolution asked for. Pixels stay as they are: the size is that at which they are
    printed.

    Args:
        picture: complete; a figure is changed.
        figures: format, size and resolution.

    Returns:
        The files by format: ``png``, which reports and trackers show, and ``figures.format`` if that is another.
    """
    formats = dict.fromkeys(("png", figures.format))
    if isinstance(picture, Figure):
        resize(picture, figures.width, figures.height)
        return {form: figure_file(picture, form, figures.dpi) for form in formats}
    if isinstance(picture, bytes):
        with Image.open(io.BytesIO(picture)) as image:
            pixels = np.asarray(image.convert("RGB"))
        return {form: picture if form == "png" else _pixels_file(pixels, form, figures) for form in formats}
    return {form: _pixels_file(picture, form, figures) for form in formats}


def pixels_png(pixels: np.ndarray, dpi: float | None = None) -> bytes:
    """Pixels, RGB (H, W, 3), uint8, as a PNG file.

    Args:
        pixels: of the picture.
        dpi: how many of them are to be printed on an inch; None: not said.
    """
    buffer = io.BytesIO()
    # Level 1: files a tenth larger, written in a third of the time.
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1, **({"dpi": (dpi, dpi)} if dpi else {}))
    return buffer.getvalue()


def _pixels_file(pixels: np.ndarray, form: str, figures: FiguresConfig) -> bytes:
    height, width = pixels.shape[:2]
    dpi = width / figures.width if figures.width else height / figures.height if figures.height else figures.dpi
    if form == "png":
        return pixels_png(pixels, dpi)
    figure = new_figure(width / dpi, height / dpi, dpi)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), frameon=False, xticks=[], yticks=[])
    axes.imshow(pixels, interpolation="none", aspect="auto")  # the file holds each pixel as it is
    return figure_file(figure, form)


def undrawable() -> set[str]:
    """The characters that this process was to draw, and for which no font is installed."""
    return set(_undrawable)


@contextlib.contextmanager
def _complete(figure: Figure) -> Iterator[None]:
    """Fonts for all letters, and a layout; missing letters raise no warning (:func:`undrawable`)."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_ticklabels()  # which writes them
    texts: list[Any] = figure.findobj(Text)
    if not all(text.get_text().isascii() for text in texts):
        for text in texts:
            text.set_fontfamily([*text.get_fontfamily(), *_installed()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=r"Glyph .* missing")
        if figure.get_layout_engine() is None and any(axes.get_subplotspec() for axes in figure.axes):
            figure.tight_layout()
        yield
    missing = (re.match(r"Glyph (\d+)", str(each.message)) for each in caught)
    _undrawable.update(chr(int(each[1])) for each in missing if each)


@lru_cache(maxsize=1)
def _installed() -> list[str]:
    known = {entry.name for entry in font_manager.fontManager.ttflist}
    return [name for name in _FALLBACKS if name in known]


def training_curves(records: Sequence[dict[str, Any]], metric: str, greater_is_better: bool, title: str) -> Figure:
    """Three panels above one another.

    Args:
        records: the lines of ``metrics.jsonl``: each has ``split``, ``step`` and values by name.
        metric: the validation metric to show.
        greater_is_better: which of its values is marked as the best.
        title: above the figure.
    """
    frame = pd.DataFrame(list(records), columns=None if records else ["split", "step"]).set_index("step")
    train, val = (frame[frame["split"] == split] for split in ("train", "val"))
    figure = new_figure(8, 7)
    loss, score, rate = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 3, 1.6]})
    _draw_losses(loss, train)
    _draw_score(score, _readings(val, metric), metric, greater_is_better)
    rate.plot(_readings(train, "lr"), color="tab:green", linewidth=1.2)
    rate.set_ylabel("lr")  # its panel is low
    rate.set_xlabel("optimizer steps")
    rate.set_ylim(bottom=0.0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    for axes in (loss, score, rate):
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    title_and_legend(loss, title)
    title_and_legend(score, "")
    figure.align_ylabels()
    return figure


def _readings(frame: pd.DataFrame, name: str) -> pd.Series[float]:
    """One quantity by step."""
    return frame[name].dropna().astype(float) if name in frame else pd.Series(dtype=float)


def _draw_losses(axes: Any, train: pd.DataFrame) -> None:
    """The sum strongly, its parts (``loss_*``) faintly; with many readings also a running mean."""
    parts = train.filter(regex="^loss_").dropna(axis="columns", how="all").sort_index(axis="columns")
    total, several = _readings(train, "loss"), parts.shape[1] > 1
    many = len(total) >= _SMOOTHED_FROM
    for number, name in enumerate(parts if several else [], 1):
        axes.plot(_readings(parts, name), color=f"C{number}", linewidth=0.9, alpha=0.8, label=label(name[5:]))
    strength = {"linewidth": 0.8, "alpha": 0.35} if many else {"linewidth": 1.4}
    axes.plot(total, color="tab:blue", marker="o" if len(total) <= 25 else None, markersize=3,
              label="loss" if several and not many else None, **strength)  # fmt: skip
    if many:
        mean = total.ewm(alpha=20 / len(total)).mean()
        axes.plot(mean, color="tab:blue", linewidth=1.6, label="loss (running mean)")
    axes.set_ylabel("training loss")
    if total.min() > 0 and total.max() > 20 * total.min():
        axes.set_yscale("log")


def _draw_score(axes: Any, values: pd.Series[float], metric: str, greater_is_better: bool) -> None:
    axes.plot(values, color="tab:orange", linewidth=1.4, marker="o", markersize=3.5)
    as_it_is(axes.set_ylabel(f"validation {metric}"))
    finite = values[values.abs() < float("inf")]
    if finite.empty:
        axes.text(0.5, 0.5, "no validation", transform=axes.transAxes, ha="center", va="center", color="0.5")
        return
    step = finite.idxmax() if greater_is_better else finite.idxmin()
    best = f"best: {finite[step]:.4g} at step {step}"
    axes.plot(step, finite[step], "*", markersize=13, color="tab:red", label=best)
    axes.margins(y=0.15)
