from __future__ import annotations

import subprocess
import sys
import textwrap

import cv2
import numpy as np
import pytest

from exp.data.images.decode import convert, read_image
from exp.errors import DataError
from tests.conftest import clean_environment
from tests.data.images.conftest import SAMPLES


def test_colours_come_in_the_order_of_the_file(tmp_path, noise):
    written = noise(tmp_path / "ä x.png")
    read = read_image(tmp_path / "ä x.png")
    assert read.dtype == np.uint8
    np.testing.assert_array_equal(read, written)


def test_sixteen_bits_keep_their_depth():
    path = next((SAMPLES / "eurosat_nir" / "Forest").iterdir())
    values = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    assert values.dtype == np.uint16
    whole = read_image(path, channels=1)
    np.testing.assert_allclose(whole[..., 0], values / 257.0, rtol=1e-6)
    stretched = read_image(path, channels=3, value_range=(1000, 3000))
    assert stretched.dtype == np.float32
    assert stretched.shape == (64, 64, 3)
    np.testing.assert_allclose(stretched[..., 1], np.clip((values - 1000.0) / 2000.0, 0, 1) * 255, atol=1e-3)


def test_a_thermal_frame_is_grey():
    path = next((SAMPLES / "hituav" / "night").iterdir())
    grey = read_image(path, channels=1)
    assert grey.shape == (512, 640, 1)
    np.testing.assert_array_equal(read_image(path, channels=3), np.repeat(grey, 3, axis=2))


@pytest.mark.parametrize(("found", "wanted"), [(2, 1), (4, 3), (1, 3), (2, 3), (3, 1), (4, 1), (5, 5)])
def test_channels_by_one_rule(found, wanted):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, found), dtype=np.uint8)
    made = convert(pixels, "x.png", wanted)
    assert made.shape == (4, 5, wanted)
    assert made.flags.c_contiguous
    if wanted == 1 and found > 2:
        expected = pixels[..., :3] @ np.array([0.299, 0.587, 0.114])
        np.testing.assert_allclose(made[..., 0], expected, atol=0.51)
    elif found < wanted:
        np.testing.assert_array_equal(made, pixels[..., [0, 0, 0]])
    else:
        np.testing.assert_array_equal(made, pixels[..., :wanted])


@pytest.mark.parametrize(("found", "wanted"), [(3, 4), (1, 2), (5, 3), (13, 12)])
def test_other_channels_are_refused(found, wanted):
    with pytest.raises(
        DataError, match=rf"x.png has {found} channels, but data.channels={wanted}; give images of {wanted}, or train"
    ):
        convert(np.zeros((4, 5, found), np.uint8), "x.png", wanted)


def test_values_without_a_known_range_need_one():
    with pytest.raises(DataError, match=r"x.tif holds float32 values; set data.value_range"):
        convert(np.zeros((2, 2, 1), np.float32), "x.tif", 1)
    made = convert(np.array([[-2.0, 0.0, 1.0, 9.0]], np.float32), "x.tif", 1, (0.0, 2.0))
    np.testing.assert_array_equal(made[..., 0], [[0.0, 0.0, 127.5, 255.0]])


@pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
def test_tiffs_of_many_channels(tmp_path):
    rasterio = pytest.importorskip("rasterio")
    bands = np.random.default_rng(0).integers(0, 3000, (13, 6, 7), dtype=np.uint16)
    profile = {"driver": "GTiff", "height": 6, "width": 7, "count": 13, "dtype": "uint16", "compress": "lzw"}
    with rasterio.open(tmp_path / "all.tif", "w", **profile) as file:
        file.write(bands)
    read = read_image(tmp_path / "all.tif", channels=13, value_range=(0, 3000))
    np.testing.assert_allclose(read, np.moveaxis(bands, 0, -1) * (255 / 3000), rtol=1e-5)


@pytest.mark.parametrize(("channels", "said"), [(3, "(40, 50, 3)"), (4, "need rasterio (pip install 'exp[geo]')")])
def test_without_rasterio_tiffs_of_up_to_three_channels_are_read(tmp_path, noise, channels, said):
    noise(tmp_path / "x.tif", channels=channels)
    (tmp_path / "find.py").write_text(
        textwrap.dedent(
            """
            import importlib.util, sys

            class Hidden:
                # Finds everything but rasterio, as where it is not installed.
                def __init__(self, finder):
                    self.finder = finder

                def find_spec(self, name, path=None, target=None):
                    return None if name == "rasterio" else self.finder.find_spec(name, path, target)

            sys.meta_path[:] = [Hidden(finder) for finder in sys.meta_path]
            from exp.data.images.decode import read_image
            from exp.errors import DataError

            try:
                print(read_image("x.tif", int(sys.argv[1])).shape)
            except DataError as error:
                print(error)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "find.py", str(channels)],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert said in done.stdout, done.stderr


@pytest.mark.parametrize("suffix", ["jpg", "png"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path, noise, suffix, share, capfd):
    path = tmp_path / f"x.{suffix}"
    noise(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=rf"x\.{suffix} is (truncated|empty)"):
        read_image(path)
    assert capfd.readouterr().err == ""  # OpenCV has nothing to add


def test_bytes_after_the_end_of_a_jpeg_do_no_harm(tmp_path, noise):
    noise(tmp_path / "x.jpg")
    whole = read_image(tmp_path / "x.jpg")
    with (tmp_path / "x.jpg").open("ab") as file:
        file.write(b"\0" * 100)
    np.testing.assert_array_equal(read_image(tmp_path / "x.jpg"), whole)


def test_the_end_of_a_preview_is_not_that_of_its_jpeg(tmp_path, noise):
    """A camera's file holds a small JPEG in front of the large one; here the large one is cut."""
    noise(tmp_path / "small.jpg", 8, 8)
    noise(tmp_path / "large.jpg", 100, 100)
    small, large = ((tmp_path / name).read_bytes() for name in ("small.jpg", "large.jpg"))
    segment = b"\xff\xe1" + (len(small) + 2).to_bytes(2, "big") + small
    (tmp_path / "x.jpg").write_bytes(large[:2] + segment + large[2:-200])
    with pytest.raises(DataError, match="truncated"):
        read_image(tmp_path / "x.jpg")
    (tmp_path / "x.jpg").write_bytes(large[:2] + segment + large[2:])
    assert read_image(tmp_path / "x.jpg").shape == (100, 100, 3)


@pytest.mark.parametrize("name", ["x.png", "x.jpg", "x.tif"])
def test_what_is_no_image_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"<html>404</html>" * 10)
    with pytest.raises(DataError, match=rf"{name} cannot be (decoded|read)"):
        read_image(tmp_path / name)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"x.jpg cannot be read: No such file"):
        read_image(tmp_path / "x.jpg")
