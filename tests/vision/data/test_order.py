"""Red, green and blue are taken by what a file says of its bands, wherever they lie."""

from __future__ import annotations

import pytest

from exp.vision.data.decode import read_raw, reordered_bands
from exp.vision.data.reader import ImageReader

rasterio = pytest.importorskip("rasterio")
COLOURS = ["red", "green", "blue"]


@pytest.mark.parametrize(
    ("descriptions", "interpretation", "found"),
    [
        (["blue", "green", "red"], None, ["blue", "green", "red"]),
        (["B02", "B03", "B04"], None, ["B02", "B03", "B04"]),
        (None, ["blue", "green", "red"], ["blue", "green", "red"]),
        (["Band 1", "Band 2", "Band 3"], ["blue", "green", "red"], ["blue", "green", "red"]),  # says nothing
        (["red", "green", "blue"], ["blue", "green", "red"], []),  # whoever described them knows
        (None, ["red", "green", "blue"], []),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_bands_are_taken_as_colours(tmp_path, noise, descriptions, interpretation, found, channels):
    pixels = noise(tmp_path / "rgb.png")
    stored = pixels[..., ::-1] if found else pixels
    with rasterio.open(tmp_path / "x.tif", "w", driver="GTiff", height=40, width=50, count=3, dtype="uint8") as file:
        file.write(stored.transpose(2, 0, 1))
        if descriptions is not None:
            file.descriptions = descriptions
        if interpretation is not None:
            file.colorinterp = [rasterio.enums.ColorInterp[name] for name in interpretation]
    assert reordered_bands(tmp_path / "x.tif") == found
    reader = ImageReader(channels)
    assert (reader(tmp_path / "x.tif") == reader(tmp_path / "rgb.png")).all()
    assert read_raw(tmp_path / "x.tif").order == ([2, 1, 0] if found else None)
