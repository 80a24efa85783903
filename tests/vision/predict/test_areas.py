from __future__ import annotations

import pandas as pd
import pytest

from exp.vision.predict.areas import Area, areas_csv, total_csv


def table(content, tmp_path):
    (tmp_path / "table.csv").write_bytes(content)
    return pd.read_csv(tmp_path / "table.csv")


def test_shares_are_of_the_known_pixels_and_metres_of_pixels(tmp_path):
    areas = [Area("a.tif", [1, 3], [4.0, 12.0]), Area("b, c.tif", [0, 0], [0.0, 0.0])]
    rows = table(areas_csv(areas, ["road", "water"]), tmp_path)
    assert list(rows.columns) == ["file", "class", "pixels", "share", "square_metres"]
    assert rows["file"].tolist() == ["a.tif", "a.tif", "b, c.tif", "b, c.tif"]
    assert rows["share"].tolist() == [0.25, 0.75, 0.0, 0.0]
    assert rows["square_metres"].tolist() == [4.0, 12.0, 0.0, 0.0]


@pytest.mark.parametrize(("second", "metres"), [([2.0, 2.0], [6.0, 6.0]), (None, None)])
def test_the_total_knows_square_metres_only_where_all_images_do(tmp_path, second, metres):
    rows = table(total_csv([Area("a", [1, 1], [4.0, 4.0]), Area("b", [2, 2], second)], ["road", "water"]), tmp_path)
    assert rows["pixels"].tolist() == [3, 3]
    if metres is None:
        assert rows["square_metres"].isna().all()
    else:
        assert rows["square_metres"].tolist() == metres
