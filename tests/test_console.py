"""What a terminal shows of a run that goes on."""

from __future__ import annotations

import json

from exp.launcher.follow import progress_of
from exp.runs.folder import RunFolder


def test_how_far_a_training_is(tmp_path):
    folder = RunFolder(tmp_path)
    assert progress_of(folder) == ""
    train = {"split": "train", "step": 120, "epoch": 1, "loss": 0.5, "samples_per_second": 64.0}
    lines = [{"split": "val", "step": 100, "epoch": 1, "mse": 1.0}, train]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"split": "tr')
    assert progress_of(folder) == "step 120  loss 0.5000"
