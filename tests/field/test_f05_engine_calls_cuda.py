"""F5: "Found no NVIDIA driver on your system", inside the engine's init_dist, on a machine with GCUs only.

MMEngine's init_dist("pytorch") calls torch.cuda.set_device for every device that it does not know.

With exp the process group and the device belong to the backend: nothing calls CUDA on another one. A call would not go
unnoticed: here, as on any machine without CUDA, each that touches a device raises.
"""

from __future__ import annotations

import pytest
import torch

from tests.field.conftest import CARD
from tests.simulators import needs_card

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA card here, and no call of it fails")

NO_CUDA = (
    "Found no NVIDIA driver on your system",  # what the users saw: builds with CUDA, and torch 1.10 in any build
    "module 'torch._C' has no attribute '_cuda_setDevice'",  # recent builds without CUDA
)


@needs_card
def test_stock_mmengine_calls_cuda(stock):
    script = """
        import os
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        from mmengine.dist import init_dist
        init_dist("pytorch", backend="gloo")
    """
    (ended,) = stock(script, card=True, begin=CARD)
    assert ended.returncode == 1
    assert "torch.cuda.set_device(local_rank)" in ended.printed
    assert any(text in ended.last for text in NO_CUDA), ended.last


@needs_card
def test_any_call_of_cuda_would_fail(stock):
    (ended,) = stock("torch.cuda.synchronize()", card=True, begin=CARD)
    assert ended.returncode == 1


@needs_card
def test_exp_calls_none(eight_cards):
    assert eight_cards.result["status"] == "completed"
    assert eight_cards.result["world_size"] == 8
    assert "eccl" in eight_cards.result["process_group"]
