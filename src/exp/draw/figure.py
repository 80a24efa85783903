"""Figures with axes: matplotlib's object interface, without the global state of pyplot."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any, Iterator

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from exp.draw.fonts import faces_for

__all__ = [
    "as_it_is",
    "figure_file",
    "figure_pixels",
    "figure_png",
    "label",
    "new_figure",
    "resize",
    "title_and_legend",
]

_SMALLEST_LETTERS = 6.0  # points, the least that journals print
_THINNEST = 0.6  # of what lines were
_LEGEND_LINE = 1.6  # times the size of its letters


def new_figure(width: float, height: float, dpi: int = 110) -> Figure:
    """An empty figure of that size in inches; its canvas needs no display."""
    figure = Figure(figsize=(width, height), dpi=dpi)
    FigureCanvasAgg(figure)
    return figure


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


def resize(figure: Figure, width: float | None = None, height: float | None = None) -> None:
    """Give a figure another size, before it is drawn; where it becomes narrower, letters and lines shrink,
    letters to 6 points.

    Args:
        figure: complete.
        width: in inches; None: in proportion to ``height``, or as it is.
        height: likewise.
    """
    old = figure.get_size_inches()
    if width is None and height is None:
        return
    new_width = width if width is not None else old[0] * float(height or 0) / old[1]
    new_height = height if height is not None else old[1] * new_width / old[0]
    figure.set_size_inches(new_width, new_height)
    factor = min(new_width / old[0], 1.0)
    axes = [axis for each in figure.axes for axis in (each.xaxis, each.yaxis)]
    of_ticks = {axis: max((text.get_fontsize() for text in axis.get_ticklabels()), default=None) for axis in axes}
    for text in figure.findobj(Text):
        text.set_fontsize(_scaled(text.get_fontsize(), factor))
    for line in figure.findobj(Line2D):
        line.set_linewidth(line.get_linewidth() * max(factor, _THINNEST))
        line.set_markersize(line.get_markersize() * max(factor, _THINNEST))
    for axis, size in of_ticks.items():
        if size is not None:  # also those of ticks that are made later
            axis.set_tick_params(labelsize=_scaled(size, factor))


def figure_png(figure: Any) -> bytes:
    """The bytes of a PNG file."""
    return figure_file(figure, "png")


def figure_file(figure: Figure, form: str, dpi: float | None = None) -> bytes:
    """The bytes of an image file.

    Letters in PDF are fonts (TrueType, as publishers ask for), in SVG outlines, which need no font. Characters that the
    default typeface lacks are taken from the installed fonts (:func:`exp.draw.fonts.faces_for`).

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
    canvas = FigureCanvasAgg(figure)
    with _complete(figure):
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


@contextlib.contextmanager
def _complete(figure: Figure) -> Iterator[None]:
    """Fonts for all letters, and a layout; missing letters raise no warning (:func:`exp.draw.fonts.undrawable`)."""
    _take_fonts(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing")
        if figure.get_layout_engine() is None and any(axes.get_subplotspec() for axes in figure.axes):
            figure.tight_layout()
        yield


def _scaled(size: Any, factor: float) -> float:
    return max(float(size) * factor, min(float(size), _SMALLEST_LETTERS))


def _take_fonts(figure: Figure) -> None:
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = axis.get_ticklabels()  # which also writes them
            _take_font(labels, "".join(text.get_text() for text in labels))
    for text in figure.findobj(Text):
        _take_font([text], text.get_text())


def _take_font(texts: Any, content: str) -> None:
    faces = faces_for(content)
    for text in texts if faces else ():
        families = text.get_fontfamily()
        text.set_fontfamily([*families, *(face.family for face in faces if face.family not in families)])
