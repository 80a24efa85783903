"""Whether a JPEG is whole: decoders fill what is missing with grey, and give no error."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

__all__ = ["is_jpeg", "lacks_end", "truncated"]

_END, _SCAN = b"\xff\xd9", b"\xff\xda"
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
_FRAMES = tuple(marker for marker in range(0xC0, 0xD0) if marker not in (0xC4, 0xC8, 0xCC))
# Any bits that a decoder short of data would take for coefficients; no 0xFF, which would begin a marker.
_FOREIGN = bytes(np.random.default_rng(0).integers(0, 255, 1024, dtype=np.uint8))
_whole: set[int] = set()  # hashes of progressive files that were found to be whole: once in a process is enough


def is_jpeg(content: np.ndarray) -> bool:
    """Whether the bytes of a file, uint8 (size,), begin as a JPEG does."""
    return content[:2].tobytes() == b"\xff\xd8"


def lacks_end(content: np.ndarray) -> bool:
    """Whether a file ends before its end marker; OpenCV says so on standard error only."""
    if content[-2:].tobytes() == _END:
        return False
    data = content.tobytes()  # bytes may follow the end; but an embedded preview has an end of its own, too
    return data.rfind(_END) <= data.rfind(_SCAN)  # or there is neither


def truncated(content: np.ndarray, pixels: np.ndarray) -> bool:
    """Whether data are missing before the end marker, as a broken copy that a tool has closed again has it.

    What is missing of a sequential JPEG is decoded to middle grey, down to its last block: only where that one is grey
    a second decoder has to say whether it would have gone on reading. A progressive one may lack detail anywhere.

    Args:
        content: of the file, uint8 (size,).
        pixels: decoded, (H, W) or (H, W, C), uint8.
    """
    grey = bool((np.abs(pixels[-8:, -8:].astype(np.int16) - 128) <= 8).all())
    progressive = _frame(content) in _PROGRESSIVE
    if not grey and not progressive:
        return False
    data = content.tobytes()
    key = hash(data)
    if key in _whole:
        return False
    end = data.rfind(_END)
    # A decoder that has all it needs ignores what follows; one that lacks data takes it for image.
    missing = not np.array_equal(_decoded(data), _decoded(data[:end] + _FOREIGN + data[end:]))
    if not missing:
        _whole.add(key)
    return missing


def _decoded(data: bytes) -> np.ndarray:
    """Decoded by Pillow: it says nothing on standard error."""
    with Image.open(io.BytesIO(data)) as file:
        return np.asarray(file)


def _frame(content: np.ndarray) -> int:
    """The marker of the frame, which tells how it is coded; 0: there is none."""
    position = 2
    while position + 4 <= content.size and content[position] == 0xFF:
        marker = int(content[position + 1])
        if marker in _FRAMES:
            return marker
        position += 2 + int(content[position + 2]) * 256 + int(content[position + 3])
    return 0
