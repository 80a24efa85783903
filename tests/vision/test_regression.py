"""Dense regression: targets, losses and metrics by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from exp.distributed import Distributed
from exp.errors import ConfigError, DataError
from exp.vision.data.masks import markers
from exp.vision.data.regression import Targets
from exp.vision.losses import L1, Huber, ScaleInvariant
from exp.vision.metrics import AbsoluteError, RegressionErrors, RSquared

NAN = float("nan")
RANGE = {"target_range": [0.0, 40.0]}


def test_targets_have_values_of_their_range_alone(tmp_path):
    values = np.array([[0.0, 254.0, -9999.0], [39.5, NAN, 1e30]], np.float32)
    Image.fromarray(values, mode="F").save(str(tmp_path / "x.tif"), tiffinfo={42113: "254"})  # GDAL's no-data tag
    expected = np.array([[0.0, NAN, NAN], [39.5, NAN, NAN]], np.float32)
    np.testing.assert_array_equal(Targets([0.0, 300.0]).read(str(tmp_path / "x.tif")), expected)
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(str(tmp_path / "rgb.png"))
    with pytest.raises(DataError, match=r"rgb\.png is no target"):
        Targets([0.0, 1.0]).read(str(tmp_path / "rgb.png"))
    coarse = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    fine = Targets.enlarge(coarse, (7, 10))
    assert fine.shape == (7, 10)
    assert fine[3, 3] == 0
    assert fine[4, 4] == 4
    assert fine[6, 9] == 5
    assert Targets.enlarge(coarse, (7, 13)).shape == (2, 3)  # not cells of one size: the caller refuses it
    assert markers(np.dtype(np.uint8)) == (255, 254)


def test_losses_leave_out_pixels_without_a_value():
    target = torch.tensor([[[0.0, 10.0], [20.0, NAN]], [[NAN, NAN], [NAN, NAN]]])
    values = torch.tensor([[[1.0, 7.0], [20.5, 99.0]], [[1.0, 2.0], [3.0, 4.0]]])
    errors = np.array([1.0, -3.0, 0.5])
    assert float(L1(**RANGE)(values, target)) == pytest.approx(np.abs(errors).sum() / 8)
    huber = (0.5 * 1.0 + 2.0 * (3.0 - 1.0) + 0.5 * 0.25) / 2.0 / 8
    assert float(Huber(delta=2.0, **RANGE)(values, target)) == pytest.approx(huber)
    logs = np.log(np.array([2.0, 8.0, 21.5])) - np.log(np.array([1.0, 11.0, 21.0]))
    expected = ((logs**2).mean() - 0.5 * logs.mean() ** 2) / 2  # the second image has no value
    assert float(ScaleInvariant(**RANGE)(values, target)) == pytest.approx(expected, rel=1e-5)
    ScaleInvariant(**RANGE)(values.requires_grad_(), target).backward()
    assert torch.isfinite(values.grad).all()
    assert not values.grad[1].any()
    assert torch.isfinite(ScaleInvariant(**RANGE)(torch.full((1, 1, 2), -50.0), target[:1, :1]))
    with pytest.raises(ConfigError, match="offset"):
        ScaleInvariant(offset=5.0, target_range=[-5.0, 10.0])


def test_metrics_are_those_of_all_pixels_however_they_are_divided():
    generator = np.random.default_rng(0)
    truth = generator.normal(300.0, 5.0, (5, 7, 6)).astype(np.float32)
    predicted = truth + generator.normal(1.0, 2.0, truth.shape).astype(np.float32)
    truth[0], truth[2, :3] = NAN, NAN
    found = {}
    for metric in (RegressionErrors("m"), RSquared(), AbsoluteError()):
        for part in (slice(0, 1), slice(1, 4), slice(4, 5)):
            metric.update(torch.from_numpy(predicted[part]), {"label": torch.from_numpy(truth[part])})
        found.update(metric.compute(Distributed()))
    known = ~np.isnan(truth)
    error = (predicted.astype(np.float64) - truth)[known]
    expected = {"MAE": np.abs(error).mean(), "RMSE": (error**2).mean() ** 0.5, "bias": error.mean(),
                "R2": 1 - (error**2).mean() / truth[known].astype(np.float64).var()}  # fmt: skip
    images = [np.abs((predicted - truth)[row][known[row]]).mean() for row in range(1, 5)]
    assert found == pytest.approx({**expected, "image_MAE": np.mean(images)}, rel=1e-5)
    assert dict(RegressionErrors("m").units)["RMSE"] == "m"
