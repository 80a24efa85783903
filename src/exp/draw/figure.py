"""Figures with axes: matplotlib's object interface, without the global state of pyplot."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["figure_png", "new_figure"]


def new_figure(width: float, height: float, dpi: int = 110) -> Figure:
    """An empty figure of that size in inches; its canvas needs no display."""
    figure = Figure(figsize=(width, height), dpi=dpi)
    FigureCanvasAgg(figure)
    return figure


def figure_png(figure: Any) -> bytes:
    """The bytes of a PNG file."""
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
