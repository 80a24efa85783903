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
_IN_TOTAL = 200
_BYTES = 12_000_000  # in base64; the page is to stay below 15
_PIXELS = 120_000_000  # of a file; the overlay of a whole satellite scene takes gigabytes to decode


def album(runs: Sequence[Run]) -> str:
    """The first six pictures of each run as HTML, until there are 200 or 12 MB of them; how many more there are.

    Args:
        runs: the best first.
    """
    parts: list[str] = []
    left_out = unreadable = count = size = 0
    for run in runs:
        shown: list[str] = []
        for path in run.pictures():
            if len(shown) == _PER_RUN or count == _IN_TOTAL or size > _BYTES:
                left_out += 1
                continue
            address = thumbnail(path)
            if address is None:
                unreadable += 1
                continue
            name = escape(path.relative_to(run.folder).as_posix())
            image = f'<img src="{address}" alt="{escape(run.name)}: {name}" loading="lazy">'
            shown.append(
                f'<figure><button type="button" class="zoom">{image}</button><figcaption>{name}</figcaption></figure>'
            )
            count, size = count + 1, size + len(address)
        if shown:
            parts.append(f'<h3>{escape(run.name)}</h3>\n<div class="pictures">{"".join(shown)}</div>')
    notes = [f"{left_out} more are in the run folders"] if left_out else []
    notes += [f"{unreadable} could not be read, or are too large"] if unreadable else []
    if not parts and not notes:
        return ""
    told = f'<p class="note">{"; ".join(notes)}.</p>' if notes else ""
    return "\n".join(["<section><h2>Pictures <small>click one to enlarge it</small></h2>", told, *parts, "</section>"])


def thumbnail(path: Path) -> str | None:
    """A picture of at most 640 pixels in width as an address that needs no file; None where it cannot be read."""
    try:
        with Image.open(path) as file:
            if file.width * file.height > _PIXELS:
                return None
            file.draft("RGB", (_WIDTH, _WIDTH))  # a JPEG is decoded at a fraction of its size
            picture = _on_white(file)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # Pillow's, for files that are none
        return None
    picture.thumbnail((_WIDTH, max(picture.height, 1)), Image.LANCZOS)  # type: ignore[attr-defined]
    addresses = []
    for kind in ("png", "jpeg"):  # whichever is smaller
        buffer = io.BytesIO()
        picture.save(buffer, format=kind, quality=82)
        addresses.append(f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}")
    return min(addresses, key=len)


def _on_white(picture: Image.Image) -> Image.Image:
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    if picture.mode.startswith("I"):  # 16 bit: Pillow would clip instead of scaling
        low, high = (float(each) for each in picture.getextrema())  # type: ignore[arg-type]
        scale = 255.0 / max(high - low, 1)
        return picture.convert("F").point(lambda value: value * scale - low * scale).convert("L").convert("RGB")
    return picture.convert("RGB")
