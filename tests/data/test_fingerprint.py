"""Other data are noticed, wherever they lie and whenever they were written."""

from __future__ import annotations

import hashlib
import os

from exp.data.fingerprint import dataset_fingerprint, differences, file_fingerprint


def test_a_file_is_known_by_its_size_and_its_content(tmp_path):
    file, middle = tmp_path / "a.csv", b"0" * 2**21
    file.write_bytes(middle + b"1" + middle)
    before = file_fingerprint(file)
    os.utime(file, (0, 0))
    assert before == {"a.csv": [1, 2**22 + 1, hashlib.sha256(middle + b"1" + middle).hexdigest()]}
    assert differences(before, file_fingerprint(file)) == []
    for content in (middle + b"2" + middle, b"1" + middle * 2, b"head"):
        file.write_bytes(content)
        assert differences(before, file_fingerprint(file)) == ["a.csv has changed"]


def test_of_a_file_above_100_mb_blocks_are_read_everywhere(tmp_path):
    file = tmp_path / "a.csv"
    with file.open("wb") as stream:
        stream.truncate(400_000_000)  # takes no space
    before = file_fingerprint(file)
    for place in (0, 100_000_000, 200_000_000, 399_999_999):
        with file.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"1" * 400_000)  # more than the distance of two blocks
        changed = file_fingerprint(file)
        assert changed != before
        before = changed


def image_folder(root):
    parts = {"train": [], "val": []}
    for number, name in enumerate(["river", "forest"]):
        (root / name).mkdir(parents=True)
        for index in range(3):
            path = root / name / f"{index}.png"
            path.write_bytes(b"x" * (index + 1))
            parts["val" if index == 0 else "train"].append((str(path), number))
    return parts


def test_a_folder_of_images_is_known_by_names_labels_and_contents(tmp_path):
    before = dataset_fingerprint(image_folder(tmp_path / "a"))
    parts = image_folder(tmp_path / "b")
    assert differences(before, dataset_fingerprint(parts)) == []
    (tmp_path / "b" / "river" / "1.png").write_bytes(b"xy")  # as long as before
    assert differences(before, dataset_fingerprint(parts)) == ["river/1.png has changed"]
    parts["train"] = parts["train"][1:]
    parts["val"][0] = (parts["val"][0][0], 1)  # labels may come from other files
    expected = ["river/0.png has changed", "river/1.png is no longer there"]
    assert differences(before, dataset_fingerprint(parts)) == expected
    assert differences({}, before)[0].endswith(" was not there")
