from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from exp.errors import ConfigError, DataError, RunError
from exp.vision.data.reader import ImageReader
from exp.vision.predict.inputs import Failure, each_of_mine, find_images, named, report_failures, tell_inputs


def make(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")


def test_a_folder_means_all_images_below_it_in_order(tmp_path):
    make(tmp_path, "b.JPG", "a/c.tif", "a/note.txt", "d.jpeg.bak", "a/b/x.png")
    found = find_images(str(tmp_path))
    assert found == sorted(tmp_path / name for name in ("b.JPG", "a/c.tif", "a/b/x.png"))


def test_a_glob_and_a_file_mean_what_they_say(tmp_path):
    make(tmp_path, "a/1.png", "b/1.png", "b/2.raw")
    assert find_images(str(tmp_path / "*" / "1.*")) == [tmp_path / "a/1.png", tmp_path / "b/1.png"]
    assert find_images(str(tmp_path / "**" / "2.raw")) == [tmp_path / "b/2.raw"]
    assert find_images(str(tmp_path / "b" / "2.raw")) == [tmp_path / "b/2.raw"]


@pytest.mark.parametrize(("wanted", "says"), [("empty", "folder without images"), ("no*", "matches no file")])
def test_no_images_are_an_error(tmp_path, wanted, says):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=says):
        find_images(str(tmp_path / wanted))


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x/a.png", "x/b.png"], ["a", "b"]),
        (["x/1/a.png", "x/2/a.png", "x/2/b.png"], ["1_a", "2_a", "b"]),
        (["x/a.png", "x/a.tif", "x/A.jpg"], ["a_png", "a_tif", "A_jpg"]),
        (["x/a_b.png", "x/a/b.png", "x/c/b.png"], ["a_b_png", "a_b_png_2", "c_b"]),
        (["x/a.png", "x/y/a.png"], ["a", "y_a"]),
    ],
)
def test_names_are_unique_and_short(paths, names):
    inputs = named([Path(path) for path in paths])
    assert [entry.name for entry in inputs] == names
    assert [entry.path for entry in inputs] == [Path(path) for path in paths]


def test_ranks_share_the_files_and_a_bad_one_stops_nobody(make_session):
    inputs = named([Path(f"{number}.png") for number in range(7)])
    seen: list[int] = []

    def work(number, entry):
        assert entry is inputs[number]
        if number == 3:
            raise DataError(f"{entry.path} is truncated\n  details")
        seen.append(number)

    failures = [each_of_mine(make_session(rank=rank, world_size=3), inputs, work) for rank in range(3)]
    assert seen == [0, 6, 1, 4, 2, 5]
    assert failures == [[Failure("3.png", "3.png is truncated")], [], []]


def test_an_error_that_is_no_image_s_stops(make_session):
    def work(number, entry):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        each_of_mine(make_session(), named([Path("a.png")]), work)


def test_failures_fail_the_run_unless_they_may_be_skipped():
    failures = [Failure("a.png", "is truncated")]
    with pytest.raises(RunError, match=r"1 of 3 images could not be used; the others are done") as error:
        report_failures(failures, 3, "raise")
    assert "a.png: is truncated" in str(error.value)
    assert error.value.exit_code == 1
    report_failures(failures, 3, "skip")
    report_failures([], 3, "raise")
    with pytest.raises(RunError, match="1 of 1 images could not be used"):
        report_failures(failures, 1, "skip")


def test_what_could_not_be_used_is_said_and_recorded(tmp_path, make_session):
    make(tmp_path, "a.png", "b.gif", "c.GIF", "d.txt")
    session, said = make_session(input=str(tmp_path)), []
    session.say = said.append
    inputs = named(find_images(str(tmp_path)))
    assert tell_inputs(session, inputs, [], ImageReader()) == {"other_files": {".gif": 2}}
    failures = [Failure(f"{number}.png", f"{number}.png is empty") for number in range(24)]
    told = tell_inputs(session, inputs, [Failure("x.png", "no bands"), *failures], ImageReader())["skipped"]
    assert told["count"] == 25
    assert told["files"][:2] == ["x.png: no bands", "0.png is empty"]
    assert len(told["files"]) == 20
    assert said[-5].startswith("warning: 25 of 1 images could not be used")
    assert said[-1].startswith("  and 22 more")


def test_images_whose_bands_are_named_in_another_order_are_reported(tmp_path, make_session):
    rasterio = pytest.importorskip("rasterio")
    make(tmp_path, "a.png", "c.tif")  # which is none: that is reported when it is read
    with rasterio.open(tmp_path / "b.tif", "w", driver="GTiff", height=4, width=4, count=3, dtype="uint8") as file:
        file.write(np.zeros((3, 4, 4), np.uint8))
        file.descriptions = ("blue", "green", "red")
    session, said = make_session(input=str(tmp_path)), []
    session.say = said.append
    inputs = named(find_images(str(tmp_path)))
    assert tell_inputs(session, inputs, [], ImageReader()) == {"bands_read_as_rgb": [str(tmp_path / "b.tif")]}
    assert "b.tif" in said[0]
    assert tell_inputs(session, inputs, [], ImageReader(4)) == {}
