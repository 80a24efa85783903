"""A published experiment on a made file of its shape."""

from __future__ import annotations

import gzip

import numpy as np


def test_solar_from_a_gzipped_file_without_header_and_dates(exp):
    values = np.random.default_rng(0).normal(size=(1200, 137)).cumsum(axis=0)
    with gzip.open(exp.folder / "solar_AL.txt.gz", "wt") as file:
        np.savetxt(file, values, delimiter=",", fmt="%.4f")
    solar = [
        "experiment=timebridge_solar", "data.root=.", "data.file=solar_AL.txt.gz", "data.lookback=96", "backend=cpu",
        "model.d_model=16", "model.d_ff=16", "model.num_heads=2", "model.num_patches_out=2",
    ]  # fmt: skip
    for words in (
        ["max_steps=2", "max_epochs=1", "global_batch_size=8", "output_dir=run"],
        ["task=predict", "init_from=run", "task.num_windows=1", "output_dir=predicted"],
    ):
        done = exp(*solar, *words)
        assert done.returncode == 0, done.stderr
    assert (exp.path("predicted") / "forecasts" / "future.csv").read_text().startswith("step,")
