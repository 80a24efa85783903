"""Pages, complex numbers and few bits: what decoders would pass over."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from exp.errors import DataError
from exp.vision.data.decode import read_raw
from exp.vision.data.labels import ColourMasks, IndexMasks
from exp.vision.data.reader import ImageReader
from exp.vision.data.tiff import page_count
from exp.vision.predict.raster import open_image


def opened(path):
    with open_image(path, ImageReader(), whole=0):
        pass


def pages(path, count, **more):
    made = [Image.fromarray(np.full((24, 30, 3), 50 * number, np.uint8)) for number in range(count)]
    made[0].save(path, save_all=True, append_images=made[1:], **more)


@pytest.mark.parametrize("read", [ImageReader(), opened, ColourMasks(["000000"]).read, IndexMasks(3).read])
def test_pages_beyond_the_first_are_never_left_out(tmp_path, read, monkeypatch):
    pages(tmp_path / "x.tif", 3)
    with pytest.raises(DataError, match=r"x.tif has 3 pages, and a sample is one: write each page"):
        read(tmp_path / "x.tif")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # without rasterio
    with pytest.raises(DataError, match="has 3 pages"):
        read(tmp_path / "x.tif")


def test_overviews_thumbnails_and_masks_are_no_pages(tmp_path):
    rasterio = pytest.importorskip("rasterio")
    profile = {"driver": "GTiff", "height": 64, "width": 64, "count": 3, "dtype": "uint8"}
    for name, big in (("x.tif", "NO"), ("big.tif", "YES")):
        with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True), rasterio.open(
            tmp_path / name, "w", BIGTIFF=big, **profile
        ) as file:
            file.write(np.full((3, 64, 64), 7, np.uint8))
            file.write_mask(np.full((64, 64), 255, np.uint8))
            file.build_overviews([2, 4])
        assert ImageReader()(tmp_path / name).shape == (64, 64, 3)
        with (tmp_path / name).open("rb") as file:
            head = file.read(4)
            assert head[2] == (43 if big == "YES" else 42)
    old = struct.pack("<4sI", b"II*\0", 8)
    for number, kind in enumerate((1, 2)):  # the old tag: an image, and a smaller copy of it
        old += struct.pack("<HHHIHHI", 1, 255, 3, 1, kind, 0, 0 if number else 8 + 18)
    (tmp_path / "old.tif").write_bytes(old)
    with (tmp_path / "old.tif").open("rb") as file:
        assert page_count(file) == 1


def test_a_chain_that_bites_its_tail_ends(tmp_path):
    (tmp_path / "x.tif").write_bytes(struct.pack(">4sIHHHIII", b"MM\0*", 8, 1, 256, 4, 1, 1, 8))
    with (tmp_path / "x.tif").open("rb") as file:
        assert page_count(file) == 1
    (tmp_path / "x.tif").write_bytes(b"II*\0\xff\xff\xff\xff")
    with (tmp_path / "x.tif").open("rb") as file:
        assert page_count(file) == 1, "left to the decoder"


@pytest.mark.parametrize("dtype", ["complex64", "complex_int16"])
@pytest.mark.parametrize("read", [read_raw, opened])
def test_complex_values_are_refused(tmp_path, dtype, read):
    rasterio = pytest.importorskip("rasterio")
    profile = {"driver": "GTiff", "height": 24, "width": 30, "count": 1}
    with rasterio.open(tmp_path / "slc.tif", "w", dtype=dtype, **profile) as file:
        file.write(np.full((1, 24, 30), -3 + 4j, np.complex64))
    with pytest.raises(DataError, match=rf"slc.tif holds {dtype} values, and a model takes real ones: write their amp"):
        read(tmp_path / "slc.tif")


def grey_png(path, values, bits):
    """Grey of few bits, as Pillow does not write it."""
    height, width = values.shape
    rows = np.unpackbits(values[..., None], axis=2)[..., -bits:].reshape(height, -1)
    packed = np.packbits(rows, axis=1)
    filtered = np.concatenate([np.zeros((height, 1), np.uint8), packed], axis=1)

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(filtered.tobytes()))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_masks_of_few_bits_keep_their_numbers(tmp_path, bits):
    count = min(2**bits, 200)
    values = np.random.default_rng(0).integers(0, count, (20, 37)).astype(np.uint8)
    grey_png(tmp_path / "x.png", values, bits)
    np.testing.assert_array_equal(IndexMasks(count).read(tmp_path / "x.png").values, values)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("photometric", ["minisblack", "miniswhite"])
def test_masks_of_few_bits_keep_their_numbers_in_tiffs(tmp_path, bits, photometric):
    rasterio = pytest.importorskip("rasterio")
    count = min(2**bits, 200)
    values = np.random.default_rng(0).integers(0, count, (20, 37)).astype(np.uint8)
    profile = {"driver": "GTiff", "height": 20, "width": 37, "count": 1, "dtype": "uint8"}
    with rasterio.open(tmp_path / "x.tif", "w", nbits=bits, photometric=photometric, **profile) as file:
        file.write(values[None])
    np.testing.assert_array_equal(IndexMasks(count).read(tmp_path / "x.tif").values, values)


@pytest.mark.parametrize("read", [ImageReader(), opened, ColourMasks(["000000"]).read])
def test_colours_of_cielab_are_refused(tmp_path, read, monkeypatch):
    Image.fromarray(np.full((24, 30, 3), 50, np.uint8)).convert("LAB").save(tmp_path / "x.tif")
    with pytest.raises(DataError, match=r"x.tif has colours of CIELAB, which decoders turn .*: convert it to RGB"):
        read(tmp_path / "x.tif")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # without rasterio
    with pytest.raises(DataError, match=r"x.tif has colours of CIELAB"):
        read(tmp_path / "x.tif")
