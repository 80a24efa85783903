"""Other data are noticed, wherever they lie and whenever they were written."""

from __future__ import annotations

import os

from exp.data.places import differences, of_file, of_samples


def test_a_file_is_known_by_its_size_and_its_ends(tmp_path):
    file, middle = tmp_path / "a.csv", b"0" * 2**22
    file.write_bytes(b"head" + middle + b"tail")
    before = of_file(file)
    os.utime(file, (0, 0))
    assert differences(before, of_file(file)) == []
    for content in (b"head" + middle + b"tale", b"head"):
        file.write_bytes(content)
        assert differences(before, of_file(file)) == ["a.csv has changed"]


def image_folder(root):
    parts = {"train": [], "val": []}
    for number, name in enumerate(["river", "forest"]):
        (root / name).mkdir(parents=True)
        for index in range(3):
            path = root / name / f"{index}.png"
            path.write_bytes(b"x" * (index + 1))
            parts["val" if index == 0 else "train"].append((str(path), number))
    return parts


def test_a_folder_of_images_is_known_by_names_labels_and_sizes(tmp_path):
    before = of_samples(image_folder(tmp_path / "a"))
    parts = image_folder(tmp_path / "b")
    assert differences(before, of_samples(parts)) == []
    (tmp_path / "b" / "river" / "1.png").write_bytes(b"another")
    assert differences(before, of_samples(parts)) == ["river/1.png has changed"]
    parts["train"] = parts["train"][1:]
    parts["val"][0] = (parts["val"][0][0], 1)  # labels may come from other files
    expected = ["river/0.png has changed", "river/1.png is no longer there"]
    assert differences(before, of_samples(parts)) == expected
    assert differences({}, before)[0].endswith(" was not there")
