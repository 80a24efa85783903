"""The keys ``figures.*``, and what they may be. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from exp.config.explain import nearest
from exp.errors import ConfigError

__all__ = ["FiguresConfig", "check_figures"]

_FORMATS = ("png", "pdf", "svg")
_INCHES = (0.5, 100.0)
_DPI = (10, 2400)


@dataclass
class FiguresConfig:
    """What the pictures of a run are to be like."""

    format: str = "png"
    """``png``, ``pdf`` or ``svg``: the latter two beside PNG files, which reports and trackers show."""
    width: Optional[float] = None
    """Inches; where a picture becomes narrower, its letters shrink, to 6 points. null: its own."""
    height: Optional[float] = None
    """Inches; null: in proportion to the width."""
    dpi: int = 110
    """Pixels per inch of curves and charts. Pictures of images keep their pixels."""


def check_figures(figures: FiguresConfig) -> None:
    """Refuse what cannot be drawn.

    Raises:
        ConfigError: names the key.
    """
    if figures.format not in _FORMATS:
        raise ConfigError(
            f"figures.format={figures.format} is not one of {', '.join(_FORMATS)}{nearest(figures.format, _FORMATS)}"
        )
    for key in ("width", "height"):
        value = getattr(figures, key)
        if value is not None and not _INCHES[0] <= value <= _INCHES[1]:
            raise ConfigError(f"figures.{key}={value} must be from {_INCHES[0]} to {_INCHES[1]:g} inches, or null")
    if not _DPI[0] <= figures.dpi <= _DPI[1]:
        raise ConfigError(f"figures.dpi={figures.dpi} must be from {_DPI[0]} to {_DPI[1]} pixels per inch")
