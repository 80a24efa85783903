"""Portable operators against torch's own kernels, and on simulated cards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import clean_environment

pytestmark = pytest.mark.skipif(torch.__version__.startswith("1."), reason="no kernels can be registered from Python")

ROOT = Path(__file__).parents[2]


def test_torchs_own_samples_give_the_numbers_of_torchs_own_kernels():
    """Results, first and second derivatives, their shapes and types, of all operators that reach a portable kernel."""
    pytest.importorskip("expecttest", reason="torch's samples import it")
    done = subprocess.run(
        [sys.executable, "-m", "tests.operators.compare"],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == {}
    assert found["never"] == ["bincount"]  # below
    assert found["cases"] > 2000


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.uint8])
@pytest.mark.parametrize("corners", [False, True])
def test_filtered_bicubic_resizing_is_torchs(dtype, corners):
    from exp.operators import KERNELS

    drawn = torch.rand(2, 3, 12, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn[0] = (drawn[0] > 0.5).double()  # edges, beyond which cubic curves overshoot
    image = (drawn * 255).to(dtype)
    native = torch.ops.aten._upsample_bicubic2d_aa(image, [5, 14], corners)
    ours = KERNELS["_upsample_bicubic2d_aa"](image, [5, 14], corners)
    assert ours.dtype == native.dtype
    # Its weights of 8-bit numbers are whole, too: one step off.
    assert torch.allclose(ours.double(), native.double(), rtol=1e-6, atol=1.0 if dtype == torch.uint8 else 1e-4)


@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (3, 7, 9), (0, 3, 7, 9)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_adaptive_average_pooling_is_torchs(shape, dtype):
    from exp.operators import KERNELS

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    native = torch.ops.aten._adaptive_avg_pool2d(x, [4, 3])
    torch.testing.assert_close(KERNELS["_adaptive_avg_pool2d"](x, [4, 3]), native)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_counting_is_torchs(dtype):
    from exp.operators import KERNELS

    numbers = torch.tensor([3, 0, 5, 3, 120], dtype=dtype)
    for x in (numbers, numbers[:0]):
        for weights in (None, torch.linspace(-1, 1, 5), torch.arange(5.0).double(), torch.arange(5)):
            weights = None if weights is None else weights[: len(x)]
            for least in (0, 200):
                native = torch.ops.aten.bincount(x, weights, least)
                torch.testing.assert_close(KERNELS["bincount"](x, weights, least), native)


def test_no_samples_give_no_gradient():
    from exp.operators import KERNELS

    x, grad, weight = torch.ones(0, 4, 5, 6), torch.ones(0, 6, 3, 4), torch.ones(6, 4, 3, 3)
    ours = KERNELS["convolution_backward"](
        grad, x, weight, [6], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
    )
    groups = torch.ones(0, 2)
    ours += KERNELS["native_group_norm_backward"](x, x, groups, groups, torch.ones(4), 0, 4, 30, 2, [True, True, True])
    shapes = [(0, 4, 5, 6), (6, 4, 3, 3), (6,), (0, 4, 5, 6), (4,), (4,)]
    assert [tuple(result.shape) for result in ours] == shapes
    assert not any(result.any() for result in ours)
