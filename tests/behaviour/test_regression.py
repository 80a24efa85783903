"""A value for each pixel: training, evaluation on any number of processes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.behaviour.conftest import result

SAMPLES = Path(__file__).parents[2] / "data" / "dubai"
SMALL = [
    "experiment=dinov3_height", "backend=cpu", "data.size=32", "data.cache_mb=0", "model.backbone.depth=1",
    "model.backbone.embed_dim=24", "model.backbone.num_heads=2", "model/head=linear", "model.inference=whole",
    "data.splits={train: ['tile2/*_00[1-3].*'], val: ['tile2/*_008.*', 'tile1/*_008.*']}",
    "global_batch_size=2", "max_epochs=null", "max_steps=2", "val_every=null",
]  # fmt: skip
LOSSES = "model.losses=[{_target_: exp.vision.losses.Huber, delta: 20}, {_target_: exp.vision.losses.ScaleInvariant}]"


def test_trained_and_evaluated_in_units(exp):
    done = exp(*SMALL, LOSSES, "nproc=2", "output_dir=run")
    assert done.returncode == 0, done.stderr
    trained = result(exp.path("run"))
    assert list(trained["metrics"]) == ["MAE", "RMSE", "bias", "R2"]
    assert trained["metric_units"]["MAE"] == "%"
    assert {path.name for path in exp.path("run").glob("plots/val_*.png")} == {"val_0.png", "val_1.png"}
    done = exp("task=eval", "init_from=run", "backend=cpu", "data.eval_batch_size=1", "task.worst=1", "task.best=0",
               "output_dir=tested")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert result(exp.path("tested"))["metrics"] == pytest.approx(trained["metrics"], rel=1e-6)
    assert (exp.path("tested") / "plots" / "worst_1.png").is_file()
    rasterio = pytest.importorskip("rasterio")
    done = exp("task=predict", "init_from=run", "backend=cpu", "nproc=2", "output_dir=maps")
    assert done.returncode == 0, done.stderr
    errors = []
    for tile in ("tile1", "tile2"):
        target = next((SAMPLES / tile / "vegetation").glob("*_008.tif"))
        (image,) = [path for path in exp.path("maps").glob("predictions/values/*.tif") if tile in path.name]
        with rasterio.open(str(image)) as written, rasterio.open(str(target)) as file:
            values, truth = written.read(1), file.read(1).repeat(16, axis=0).repeat(16, axis=1)
            assert written.units == ("%",)
        errors.append(np.abs(values - truth[: values.shape[0], : values.shape[1]]).ravel())
    assert np.nanmean(np.concatenate(errors)) == pytest.approx(trained["metrics"]["MAE"], rel=1e-5)
    assert len((exp.path("maps") / "predictions" / "values.csv").read_text().splitlines()) == 3
    refused = exp("task=predict", "init_from=run", "backend=cpu", "task.probabilities=true", "output_dir=refused")
    assert refused.returncode == 2
    assert "task.probabilities" in refused.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["model.losses=[{_target_: exp.vision.losses.Dice}]"], "model.losses[0]"),
        (["data.target_range=[40,0]"], "data.target_range"),
        (["data.target_range=[200,300]"], "data.target_range"),
        (["data=dubai"], "segmentation"),
        (["data.masks=masks"], "no target"),
    ],
)
def test_what_does_not_fit_is_refused(exp, words, named):
    done = exp(*SMALL, *words, "plots=false", "output_dir=run")
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert not exp.path("run").exists()
