"""What is settled about kernels before a model is built."""

from __future__ import annotations

import pytest
import torch
from exp.backends.cpu import CpuBackend
from omegaconf import OmegaConf

from exp import compat
from exp.config.schema import OptimConfig
from exp.engine.kernels import settle_kernels
from exp.engine.optim import build_optimizer


class Unfused(CpuBackend):
    def fused_attention(self, precision: str) -> bool:
        return precision != "fp32"


@pytest.mark.skipif(not compat.TORCH_VERSION >= (2, 3), reason="attention has no switches")
def test_attention_is_not_fused_where_the_device_cannot():
    flash = torch.backends.cuda.flash_sdp_enabled
    try:
        settle_kernels(Unfused(name="cpu"), torch.device("cpu"), "bf16")
        assert flash()
        settle_kernels(Unfused(name="cpu"), torch.device("cpu"), "fp32")
        assert not flash()
        query = torch.randn(1, 2, 3, 4, requires_grad=True)
        made = torch.nn.functional.scaled_dot_product_attention(query, query, query).grad_fn
        assert "ScaledDotProduct" not in made.name()
    finally:
        compat._never_left.close()
    assert flash()
    made = torch.nn.functional.scaled_dot_product_attention(query, query, query).grad_fn
    assert "ScaledDotProduct" in made.name()


@pytest.mark.parametrize("lacking", [{"_fused_adam_"}, set()])
def test_a_fused_optimizer_is_a_foreach_one_where_its_step_would_leave_the_device(lacking):
    if compat.TORCH_VERSION < (2, 4):
        pytest.skip("the CPU has no fused optimizer")
    config = OmegaConf.structured(OptimConfig(type="Adam", lr=1.0, options={"fused": True}))
    (group,) = build_optimizer(torch.nn.Linear(2, 1, bias=False), config, lacking).param_groups
    assert (group["fused"], group["foreach"]) == ((False, True) if lacking else (True, None))
