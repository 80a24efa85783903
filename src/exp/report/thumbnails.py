"""Pictures small enough to be part of a page."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Sequence

from PIL import Image

if TYPE_CHECKING:
    from exp.report.run import Run

__all__ = ["Album", "Thumbnail", "collect", "data_uri", "thumbnail"]

_WIDTH = 640
_PER_RUN = 6
_IN_TOTAL = 200
_BYTES = 9_000_000  # which base64 makes 12 MB: the page is to stay below 15
_PIXELS = 120_000_000  # of a file; the overlay of a whole satellite scene takes gigabytes to decode


class Thumbnail(NamedTuple):
    """One picture.

    Attributes:
        name: its path below the run folder.
        content: the bytes of a PNG or JPEG file.
        kind: ``png`` or ``jpeg``.
        width: in pixels.
        height: in pixels.
    """

    name: str
    content: bytes
    kind: str
    width: int
    height: int


class Album(NamedTuple):
    """Pictures of several runs.

    Attributes:
        pictures: by run, those of the best run first.
        left_out: how many more there are.
        unreadable: how many could not be read, or are too large to be.
    """

    pictures: dict[Run, list[Thumbnail]]
    left_out: int
    unreadable: int


def collect(runs: Sequence[Run]) -> Album:
    """The first six pictures of each run, until there are 200 or 9 MB of them.

    Args:
        runs: the best first.
    """
    pictures: dict[Run, list[Thumbnail]] = {}
    left_out = unreadable = count = size = 0
    full = False
    for run in runs:
        paths = run.pictures()
        for number, path in enumerate(paths):
            if full or len(pictures.get(run, [])) == _PER_RUN:
                left_out += len(paths) - number
                break
            made = thumbnail(path, path.relative_to(run.folder).as_posix())
            if made is None:
                unreadable += 1
                continue
            if size + len(made.content) > _BYTES:
                full = True
                left_out += len(paths) - number
                break
            pictures.setdefault(run, []).append(made)
            count, size = count + 1, size + len(made.content)
            full = count == _IN_TOTAL
    return Album(pictures, left_out, unreadable)


def thumbnail(path: Path, name: str) -> Thumbnail | None:
    """A picture of at most 640 pixels in width, as PNG or JPEG, whichever is smaller; None where it cannot be read."""
    try:
        with Image.open(path) as file:
            if file.width * file.height > _PIXELS:
                return None
            file.draft("RGB", (_WIDTH, _WIDTH))  # a JPEG is decoded at a fraction of its size
            picture = _on_white(file)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # Pillow's, for files that are none
        return None
    if picture.width > _WIDTH:
        height = max(round(picture.height * _WIDTH / picture.width), 1)
        picture = picture.resize((_WIDTH, height), Image.LANCZOS)  # type: ignore[attr-defined]
    versions = []
    for kind, options in (("png", {}), ("jpeg", {"quality": 82})):
        buffer = io.BytesIO()
        picture.save(buffer, format=kind, **options)
        versions.append(Thumbnail(name, buffer.getvalue(), kind, picture.width, picture.height))
    return min(versions, key=lambda version: len(version.content))


def data_uri(content: bytes, kind: str = "png") -> str:
    """The content as an address that needs no file and no network."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def _on_white(picture: Image.Image) -> Image.Image:
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        page = Image.new("RGB", layer.size, "white")
        page.paste(layer, mask=layer.getchannel("A"))
        return page
    if picture.mode.startswith("I"):  # 16 bit: Pillow would clip instead of scaling
        low, high = picture.getextrema()
        assert isinstance(low, (int, float))
        assert isinstance(high, (int, float))
        scale = 255.0 / max(high - low, 1)
        return picture.convert("F").point(lambda value: value * scale - low * scale).convert("L").convert("RGB")
    return picture.convert("RGB")
