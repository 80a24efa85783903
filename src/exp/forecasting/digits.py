"""Numbers in the units of a file, as text: no digit is lost, and none is made up."""

from __future__ import annotations

import numpy as np

__all__ = ["shortest_texts"]

_FEWEST, _MOST = 6, 17  # significant digits; 17 tell every float64 from the others


def shortest_texts(values: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """The shortest decimal text that is standardised to the same float32 number, from six digits on.

    A model computes with standardised float32: what the text says is all that there is to be told of a forecast, also
    of a series whose mean is far larger than its standard deviation, and a truth reads as it stands in the file.

    Args:
        values: in the units of the file, float64 (..., C).
        mean: of the training rows, float64 (C,).
        std: likewise.

    Returns:
        Text of the same shape, an object array; empty where a value is nan.
    """
    flat = values.reshape(-1, values.shape[-1])
    texts = np.full(flat.shape, "", dtype=object)
    rows, channels = np.nonzero(~np.isnan(flat))
    wanted = ((flat - mean) / std).astype(np.float32)
    for digits in range(_FEWEST, _MOST + 1):
        left = [f"{value:.{digits}g}" for value in flat[rows, channels].tolist()]
        texts[rows, channels] = left
        read = (np.array(left, dtype=np.float64) - mean[channels]) / std[channels]
        unlike = read.astype(np.float32) != wanted[rows, channels]
        rows, channels = rows[unlike], channels[unlike]
        if not len(rows):
            break
    return texts.reshape(values.shape)
