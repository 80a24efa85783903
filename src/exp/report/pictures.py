"""Pictures small enough to be part of a page."""

from __future__ import annotations

import base64
import io
from html import escape
from typing import TYPE_CHECKING, Sequence

from PIL import Image

if TYPE_CHECKING:
    from pathlib import Path

    from exp.report.runs import Run

__all__ = ["album", "thumbnail"]

_WIDTH = 640
_PER_RUN = 6
_BYTES = 12_000_000  # in base64; the page is to stay below 15
_PIXELS = 120_000_000  # of a file; the overlay of a whole satellite scene takes gigabytes to decode


def album(runs: Sequence[Run]) -> str:
    """The first six pictures of each run as HTML, until there are 12 MB of them; how many more there are.

    Args:
        runs: the best first.
    """
    parts: list[str] = []
    left_out = unreadable = size = 0
    for run in runs:
        shown: list[str] = []
        for path in run.pictures():
            full = len(shown) == _PER_RUN or size > _BYTES
            address = None if full else thumbnail(path)
            left_out, unreadable = left_out + full, unreadable + (address is None and not full)
            if address is not None:
                name = escape(path.relative_to(run.folder).as_posix())
                image = f'<img src="{address}" alt="{escape(run.name)}: {name}" loading="lazy">'
                button = f'<button type="button" class="zoom">{image}</button>'
                shown.append(f"<figure>{button}<figcaption>{name}</figcaption></figure>")
                size += len(address)
        if shown:
            parts.append(f'<h3>{escape(run.name)}</h3>\n<div class="pictures">{"".join(shown)}</div>')
    notes = [f"{left_out} more are in the run folders"] * (left_out > 0)
    notes += [f"{unreadable} could not be read, or are too large"] * (unreadable > 0)
    if not parts and not notes:
        return ""
    told = f'<p class="note">{"; ".join(notes)}.</p>' if notes else ""
    return "\n".join(["<section><h2>Pictures <small>click one to enlarge it</small></h2>", told, *parts, "</section>"])


def thumbnail(path: Path) -> str | None:
    """A picture of at most 640 pixels in width as an address that needs no file; None where it cannot be read."""
    buffer = io.BytesIO()
    try:
        with Image.open(path) as file:
            if file.width * file.height > _PIXELS:
                return None
            file.draft("RGB", (_WIDTH, _WIDTH))  # a JPEG is decoded at a fraction of its size
            layer = _in_eight_bits(file).convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # Pillow's, for files that are none
        return None
    picture.thumbnail((_WIDTH, max(picture.height, 1)), Image.LANCZOS)  # type: ignore[attr-defined]
    picture.save(buffer, format="jpeg", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _in_eight_bits(picture: Image.Image) -> Image.Image:
    if not picture.mode.startswith("I"):
        return picture
    low, high = (float(each) for each in picture.getextrema())  # type: ignore[arg-type]
    scale = 255.0 / max(high - low, 1)  # of 16 bits; Pillow would clip instead of scaling
    return picture.convert("F").point(lambda value: value * scale - low * scale).convert("L")
