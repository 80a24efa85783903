"""Other data are noticed, wherever they lie and whenever they were written."""

from __future__ import annotations

import os
import shutil

from exp.data.fingerprint import differences, of_file, of_samples


def test_a_file_is_known_by_its_size_and_its_ends(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b"head" + b"0" * 2**22 + b"tail")
    before = of_file(file)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.copy(str(file), str(moved / "a.csv"))
    os.utime(moved / "a.csv", (0, 0))
    assert differences(before, of_file(moved / "a.csv")) == []
    file.write_bytes(b"head" + b"0" * 2**22 + b"tale")
    assert differences(before, of_file(file)) == ["a.csv has other contents"]
    file.write_bytes(b"head")
    assert differences(before, of_file(file)) == [f"a.csv has 4 bytes, not {2**22 + 8}"]


def image_folder(root, classes, per_class=3):
    parts = {"train": [], "val": []}
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for index in range(per_class):
            path = root / name / f"{index}.png"
            path.write_bytes(b"x" * (index + 1))
            parts["val" if index == 0 else "train"].append((str(path), number))
    return parts


def test_a_folder_of_images_is_known_by_names_labels_and_sizes(tmp_path):
    before = of_samples(image_folder(tmp_path / "a", ["river", "forest"]))
    parts = image_folder(tmp_path / "b" / "c", ["river", "forest"])
    assert differences(before, of_samples(parts)) == []
    (tmp_path / "b" / "c" / "river" / "1.png").write_bytes(b"another")
    assert differences(before, of_samples(parts)) == ["river/1.png has 7 bytes, not 2"]
    parts["train"] = parts["train"][1:]
    parts["val"][0] = (parts["val"][0][0], 1)  # labels may come from other files
    assert differences(before, of_samples(parts)) == [
        "river/0.png has other contents",
        "river/1.png is no longer there",
    ]
    assert differences({}, before)[0].endswith(" was not there")
