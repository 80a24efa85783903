"""Cells of the tables that a run writes."""

from __future__ import annotations

import csv
import io

from exp.runs.files import csv_content
from exp.vision.figures import Scene
from exp.vision.predict import predictions_csv


def test_cells_that_a_spreadsheet_would_compute_are_text():
    computed = ['=HYPERLINK("http://a.b")', "+1+2", "-cmd", "@SUM(A1)", "\t=1"]
    others = ["-1.5e-3", "+7", "-inf", "Forest", -3, "a=b"]
    (row,) = csv.reader(io.StringIO(csv_content([[*computed, *others]]).decode(), newline=""))
    assert row == [*(f"'{cell}" for cell in computed), *map(str, others)]
    scenes = [Scene("=1+1.png", [("@class", 0.5)], "-x")]
    assert predictions_csv(scenes).splitlines()[1] == b"'=1+1.png,'@class,0.5000,'-x"
