"""Figures with axes: matplotlib's object interface, without the global state of pyplot."""

from __future__ import annotations

import contextlib
import io
import warnings
from functools import lru_cache
from typing import Any, Iterator

import matplotlib as mpl
import numpy as np
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.lines import Line2D
from matplotlib.text import Text

__all__ = [
    "as_it_is", "figure_file", "figure_pixels", "label", "new_figure", "resize", "title_and_legend", "undrawable",
]  # fmt: skip

_SMALLEST_LETTERS = 6.0  # points, the least that journals print
_THINNEST = 0.6  # of what lines were
_LEGEND_LINE = 1.6  # times the size of its letters
# cm* have other characters at the places of some letters; the others show boxes and private signs.
_NO_TEXT = ("Last Resort", "STIXNonUnicode", "STIXSize", "cm")

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
    default typeface, DejaVu Sans, lacks are taken from the installed fonts.

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
    families = _families(frozenset("".join(text.get_text() for text in texts)))
    for text in texts if families else ():
        text.set_fontfamily([*text.get_fontfamily(), *families])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing")
        if figure.get_layout_engine() is None and any(axes.get_subplotspec() for axes in figure.axes):
            figure.tight_layout()
        yield


@lru_cache(maxsize=256)
def _families(letters: frozenset[str]) -> tuple[str, ...]:
    """Few installed fonts that have the letters which the default typeface lacks, the one with most of them first."""
    lacking = {letter for letter in letters if letter.isprintable()}
    lacking -= _characters(font_manager.findfont("DejaVu Sans"))
    found = []
    while lacking:
        best = max(_installed(), key=lambda entry: len(lacking & _characters(entry.fname)))
        if not lacking & _characters(best.fname):
            break
        found.append(best.name)
        lacking -= _characters(best.fname)
    _undrawable.update(lacking)
    return tuple(found)


@lru_cache(maxsize=1)
def _installed() -> list[Any]:
    """Fonts for text, upright ones of common weight first, and among these those without serifs, like the default."""
    entries = [entry for entry in font_manager.fontManager.ttflist if not entry.name.startswith(_NO_TEXT)]
    return sorted(entries, key=lambda each: (each.style != "normal", str(each.weight) not in ("400", "normal"),
                                             "Serif" in each.name, each.name))  # fmt: skip


@lru_cache(maxsize=None)
def _characters(path: str) -> frozenset[str]:
    try:
        font = FT2Font(path)
        return frozenset(map(chr, font.get_charmap())) if font.scalable else frozenset()
    except (OSError, RuntimeError):  # removed since matplotlib has looked, or broken
        return frozenset()
