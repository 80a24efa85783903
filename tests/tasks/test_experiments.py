"""The published experiments on made files of their shape: every kind of layer, split and file trains."""

from __future__ import annotations

import gzip

import numpy as np
import pandas as pd

SMALL = ["backend=cpu", "data.lookback=96", "max_steps=2", "max_epochs=1", "global_batch_size=8"]


def write_series(path, channels, rows=1200, dates=True):
    values = np.random.default_rng(0).normal(size=(rows, channels)).cumsum(axis=0)
    if dates:
        table = pd.DataFrame(values, columns=[f"c{index}" for index in range(channels)])
        table.insert(0, "date", pd.date_range("2020-01-01", periods=rows, freq="10min"))
        table.to_csv(path, index=False)
    else:
        with gzip.open(path, "wt") as file:
            np.savetxt(file, values, delimiter=",", fmt="%.4f")


def test_weather_with_cointegrated_attention_in_two_processes(exp):
    write_series(exp.folder / "weather.csv", 21)
    small = [*SMALL, "model.d_model=16", "model.d_ff=16", "model.num_heads=2", "model.num_patches_out=2"]
    done = exp("experiment=timebridge_weather", "data.root=.", *small, "nproc=2", "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert exp.result("run")["published"]["mse"] == 0.143


def test_solar_from_a_gzipped_file_without_header_and_dates(exp):
    write_series(exp.folder / "solar_AL.txt.gz", 137, dates=False)
    small = [*SMALL, "model.d_model=16", "model.d_ff=16", "model.num_heads=2", "model.num_patches_out=2"]
    done = exp("experiment=timebridge_solar", "data.root=.", "data.file=solar_AL.txt.gz", *small, "output_dir=run")
    assert done.returncode == 0, done.stderr
    done = exp("experiment=timebridge_solar", "data.root=.", "data.file=solar_AL.txt.gz", *small, "task=predict",
               "init_from=run", "output_dir=predicted", "task.num_windows=1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (exp.path("predicted") / "forecasts" / "future.csv").read_text().startswith("step,")
