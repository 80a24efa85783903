"""Figures and pixel images, and their files: PNG, and also the format and size that a paper needs.

Figures use matplotlib's object interface, without the global state of pyplot.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Sequence, Union

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


Picture = Union[Figure, np.ndarray]
"""A matplotlib figure; or pixels, RGB (H, W, 3), uint8."""
_MIN_FONT_SIZE = 6.0  # points; journals ask for at least this size
_MIN_LINE_SHARE = 0.6  # lines keep at least this share of their width
_LEGEND_LINE = 1.6  # height of a legend line, as a multiple of the font size
_FALLBACK_FONTS = (
    "Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei",
    "Droid Sans Fallback", "Microsoft YaHei", "SimHei", "PingFang SC", "Arial Unicode MS",
)  # fmt: skip
"""Fonts with characters that the default font lacks, mostly Chinese."""


def new_figure(width: float, height: float, dpi: int = 110) -> Figure:
    """An empty figure; its canvas needs no display.

    Args:
        width: in inches.
        height: in inches.
        dpi: pixels per inch.
    """
    return Figure(figsize=(width, height), dpi=dpi)


def literal_text(text: Text) -> Text:
    """Turn off math mode for a text from data or the user, so that ``$`` is drawn as ``$``; returns the text."""
    text.set_parse_math(False)
    return text


def label(text: str) -> str:
    """A label for a legend; a space is put before ``_``, because matplotlib hides labels that begin with ``_``."""
    return f" {text}" if text.startswith("_") else text


def title_and_legend(axes: Any, title: str, columns: int = 4, size: float = 9) -> None:
    """Add a title and, between the title and the axes, a legend of all labeled curves.

    Args:
        axes: matplotlib axes, after everything is drawn.
        title: text of the title, without math mode; may be empty.
        columns: maximum number of columns of the legend.
        size: font size of the legend in points.
    """
    entries = len(axes.get_legend_handles_labels()[0])
    rows = -(-entries // columns)
    literal_text(axes.set_title(title, fontsize=size + 1, loc="left", pad=6 + rows * _LEGEND_LINE * size))
    if entries:
        legend = axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncol=min(entries, columns), fontsize=size,
                             frameon=False, borderaxespad=0.1, borderpad=0.2, labelspacing=0.3,
                             columnspacing=1.4, handlelength=1.6)  # fmt: skip
        for text in legend.get_texts():
            literal_text(text)


def resize(figure: Figure, width: float) -> None:
    """Change the size of a complete figure. If it becomes narrower, fonts (to 6 points at least) and lines shrink.

    Args:
        figure: complete figure.
        width: in inches; the height is in proportion.
    """
    old_width, old_height = figure.get_size_inches()
    figure.set_size_inches(width, old_height * width / old_width)
    factor = min(width / old_width, 1.0)
    ticks = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) if axis.get_ticklabels()]
    for text in figure.findobj(Text):
        size = float(text.get_fontsize())
        text.set_fontsize(max(size * factor, min(size, _MIN_FONT_SIZE)))
    for line in figure.findobj(Line2D):
        line.set_linewidth(line.get_linewidth() * max(factor, _MIN_LINE_SHARE))
        line.set_markersize(line.get_markersize() * max(factor, _MIN_LINE_SHARE))
    for axis in ticks:  # for ticks that matplotlib creates later
        axis.set_tick_params(labelsize=axis.get_ticklabels()[0].get_fontsize())


def render_file(figure: Figure, form: str, dpi: float | None = None) -> bytes:
    """The bytes of an image file.

    Text in PDF uses embedded TrueType fonts, which publishers ask for; text in SVG is outlines, which need no font.
    Characters that the default font (DejaVu Sans) lacks are drawn with a common Chinese font, if one is installed;
    otherwise matplotlib warns of them.
    Equal figures give equal bytes.

    Args:
        figure: complete figure.
        form: ``png``, ``pdf`` or ``svg``.
        dpi: pixels per inch, also of images within a PDF or SVG; None: the figure's own.
    """
    buffer = io.BytesIO()
    _lay_out(figure)
    with mpl.rc_context({"pdf.fonttype": 42, "svg.fonttype": "path"}):
        # Without a date, files of equal figures are equal.
        figure.savefig(buffer, format=form, dpi="figure" if dpi is None else dpi,
                       metadata={"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(form))  # fmt: skip
    return buffer.getvalue()


def render_pixels(figure: Figure) -> np.ndarray:
    """A complete figure as pixels, at its own dpi: RGB (H, W, 3), uint8."""
    canvas: Any = FigureCanvasAgg(figure)  # Any: its methods have no type hints
    _lay_out(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def encode_picture(picture: Picture, options: FiguresConfig) -> dict[str, bytes]:
    """Encode a picture in the formats that the configuration key ``figures`` names.

    A figure is drawn in the configured size and resolution. Pixels are not resampled; the configured size only sets
    their dpi.

    Args:
        picture: complete picture; a figure is resized in place.
        options: format, size and resolution.

    Returns:
        File contents by format: always ``png``, for reports and trackers, and ``figures.format``.
    """
    formats = dict.fromkeys(("png", options.format))
    if isinstance(picture, Figure):
        resize(picture, options.width or picture.get_figwidth())
        return {form: render_file(picture, form, options.dpi) for form in formats}
    return {form: _pixels_file(picture, form, options) for form in formats}


def _pixels_file(pixels: np.ndarray, form: str, options: FiguresConfig) -> bytes:
    height, width = pixels.shape[:2]
    dpi = width / options.width if options.width else options.dpi
    if form == "png":
        buffer = io.BytesIO()
        # Compression level 1: files are a tenth larger, and are written in a third of the time.
        Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1, dpi=(dpi, dpi))
        return buffer.getvalue()
    figure = new_figure(width / dpi, height / dpi, dpi)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), frameon=False, xticks=[], yticks=[])
    axes.imshow(pixels, interpolation="none", aspect="auto")  # no resampling: the file has the original pixels
    return render_file(figure, form)


def _lay_out(figure: Figure) -> None:
    """Set fallback fonts and the layout, before a figure is drawn."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_ticklabels()  # creates the tick labels, so that findobj finds them
    texts: list[Any] = figure.findobj(Text)
    if not all(text.get_text().isascii() for text in texts):
        installed_fonts = {entry.name for entry in font_manager.fontManager.ttflist}
        for text in texts:
            fallbacks = [name for name in _FALLBACK_FONTS if name in installed_fonts]
            text.set_fontfamily([*text.get_fontfamily(), *fallbacks])
    if figure.get_layout_engine() is None and any(axes.get_subplotspec() for axes in figure.axes):
        figure.tight_layout()


def training_curves(records: Sequence[dict[str, Any]], metric: str, greater_is_better: bool, title: str) -> Figure:
    """A figure with three panels, over optimizer steps: training loss, validation metric, learning rate.

    Args:
        records: lines of ``metrics.jsonl``; each has ``split``, ``step`` and values by name.
        metric: name of the validation metric.
        greater_is_better: whether the largest value of the metric is marked as the best, or the smallest.
        title: title of the figure.
    """
    frame = pd.DataFrame(list(records), columns=None if records else ["split", "step"]).set_index("step")
    train, val = (frame[frame["split"] == split] for split in ("train", "val"))
    figure = new_figure(8, 7)
    loss, score, rate = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 3, 1.6]})
    _draw_losses(loss, train)
    _draw_score(score, _series_of(val, metric), metric, greater_is_better)
    rate.plot(_series_of(train, "lr"), color="tab:green", linewidth=1.2)
    rate.set_ylabel("lr")  # short, because the panel is low
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


def _series_of(frame: pd.DataFrame, name: str) -> pd.Series[float]:
    """Values of one column by step, without missing ones."""
    return frame[name].dropna().astype(float) if name in frame else pd.Series(dtype=float)


def _draw_losses(axes: Any, train: pd.DataFrame) -> None:
    """Draw the total loss, its running mean in bold, and its parts (``loss_*``) in thin lines."""
    parts = train.filter(regex="^loss_").dropna(axis="columns", how="all").sort_index(axis="columns")
    total = _series_of(train, "loss")
    for number, name in enumerate(parts if parts.shape[1] > 1 else [], 1):
        axes.plot(_series_of(parts, name), color=f"C{number}", linewidth=0.9, alpha=0.8, label=label(name[5:]))
    axes.plot(total, color="tab:blue", marker="o" if len(total) <= 25 else None, markersize=3, alpha=0.35)
    mean = total.ewm(alpha=20 / max(len(total), 20)).mean()  # of up to 20 values, the values themselves
    axes.plot(mean, color="tab:blue", linewidth=1.6, label="loss (running mean)")
    axes.set_ylabel("training loss")
    if total.min() > 0 and total.max() > 20 * total.min():
        axes.set_yscale("log")


def _draw_score(axes: Any, values: pd.Series[float], metric: str, greater_is_better: bool) -> None:
    axes.plot(values, color="tab:orange", linewidth=1.4, marker="o", markersize=3.5)
    literal_text(axes.set_ylabel(f"validation {metric}"))
    finite = values[values.abs() < float("inf")]
    if finite.empty:
        axes.text(0.5, 0.5, "no validation", transform=axes.transAxes, ha="center", va="center", color="0.5")
        return
    step = finite.idxmax() if greater_is_better else finite.idxmin()
    best = f"best: {finite[step]:.4g} at step {step}"
    axes.plot(step, finite[step], "*", markersize=13, color="tab:red", label=best)
    axes.margins(y=0.15)
