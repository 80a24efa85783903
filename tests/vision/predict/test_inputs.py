from __future__ import annotations

from pathlib import Path

import pytest

from exp.errors import ConfigError, DataError
from exp.vision.predict import find_images, map_rank_shard, name_inputs


def test_a_folder_a_glob_and_a_file_mean_what_they_say_and_no_images_are_an_error(tmp_path):
    for name in ("b/1.png", "b/2.raw", "a/1.png", "a/b/x.JPG", "a/note.txt", "c.tif", "d.jpeg.bak", "empty/note.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for wanted, names in (
        (".", ["a/1.png", "a/b/x.JPG", "b/1.png", "c.tif"]),  # all images below, in order
        ("*/1.*", ["a/1.png", "b/1.png"]),
        ("**/2.raw", ["b/2.raw"]),
        ("b/2.raw", ["b/2.raw"]),
    ):
        assert find_images(str(tmp_path / wanted)) == [tmp_path / name for name in names]
    for wanted in ("empty", "no*"):
        with pytest.raises(ConfigError, match=r"task.input="):
            find_images(str(tmp_path / wanted))


@pytest.mark.parametrize(("paths", "names"), [
    (["x/1/a.png", "x/2/a.png", "x/2/b.png"], ["1_a_png", "2_a_png", "b"]),
    (["x/a.png", "x/a.tif", "x/A.jpg"], ["a_png", "a_tif", "A_jpg"]),
    (["x/a_b.png", "x/a/b.png", "x/c/b.png"], ["a_b", "a_b_png", "c_b_png"]),
])  # fmt: skip
def test_names_are_unique_and_short(paths, names):
    assert name_inputs([Path(path) for path in paths]) == [(Path(path), name) for path, name in zip(paths, names)]


def test_ranks_share_the_files_and_a_bad_one_stops_nobody(make_session):
    inputs, seen = name_inputs([Path(f"{number}.png") for number in range(7)]), []

    def work(number, entry):
        assert entry is inputs[number]
        if number == 3:
            raise DataError(f"{entry.path} is truncated", details=["details"])
        seen.append(number)

    failures = [map_rank_shard(make_session(rank=rank, world_size=3), inputs, work, {})[1] for rank in range(3)]
    assert seen == [0, 6, 1, 4, 2, 5]
    assert failures == [["3.png: 3.png is truncated"], [], []]
