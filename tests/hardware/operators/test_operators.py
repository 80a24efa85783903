"""Portable operators against torch's own kernels, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import clean_environment

pytestmark = pytest.mark.skipif(torch.__version__.startswith("1."), reason="no kernels can be registered from Python")

ROOT = Path(__file__).parents[3]


def kernel(name: str):
    from exp.hardware.operators import KERNELS

    return KERNELS[name]


def drawn(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_torchs_own_samples_give_the_numbers_of_torchs_own_kernels():
    """Results, first and second derivatives, their shapes and types, of all operators that reach a portable kernel."""
    pytest.importorskip("expecttest", reason="torch's samples import it")
    command = [sys.executable, "-m", "tests.hardware.operators.compare"]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), stdout=subprocess.PIPE, text=True, timeout=560, check=True
    )
    found = json.loads(done.stdout)
    assert found["wrong"] == {}
    assert found["never"] == ["bincount"]  # below
    assert found["cases"] > 2000


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.uint8])
@pytest.mark.parametrize("corners", [False, True])
def test_filtered_bicubic_resizing_is_torchs(dtype, corners):
    image = drawn(2, 3, 12, 9)
    image[0] = (image[0] > 0.5).double()  # edges, beyond which cubic curves overshoot
    given = ((image * 255).to(dtype), [5, 14], corners)
    native = torch.ops.aten._upsample_bicubic2d_aa(*given)
    # Its weights of 8-bit numbers are whole, too: one step off.
    ours, off = kernel("_upsample_bicubic2d_aa")(*given), 1.0 if dtype == torch.uint8 else 1e-4
    assert ours.dtype == native.dtype
    torch.testing.assert_close(ours.double(), native.double(), rtol=1e-6, atol=off)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
@pytest.mark.parametrize("weights", [None, torch.linspace(-1, 1, 5), torch.arange(5.0).double(), torch.arange(5)])
def test_counting_is_torchs(dtype, weights):
    numbers = torch.tensor([3, 0, 5, 3, 120], dtype=dtype)
    for count, least in ((5, 0), (5, 200), (0, 0), (0, 200)):
        given = (numbers[:count], None if weights is None else weights[:count], least)
        torch.testing.assert_close(kernel("bincount")(*given), torch.ops.aten.bincount(*given))


def test_no_samples_give_no_gradient():
    x, grad, weight, groups = torch.ones(0, 4, 5, 6), torch.ones(0, 6, 3, 4), torch.ones(6, 4, 3, 3), torch.ones(0, 2)
    ours = kernel("convolution_backward")(grad, x, weight, [6], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3)
    ours += kernel("native_group_norm_backward")(x, x, groups, groups, torch.ones(4), 0, 4, 30, 2, [True] * 3)
    expected = [torch.zeros(shape) for shape in ((0, 4, 5, 6), (6, 4, 3, 3), (6,), (0, 4, 5, 6), (4,), (4,))]
    torch.testing.assert_close(list(ours), expected)
