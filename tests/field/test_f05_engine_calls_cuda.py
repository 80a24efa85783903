"""F5: "Found no NVIDIA driver on your system", inside the engine's init_dist, on a machine with GCUs only.

MMEngine's init_dist("pytorch") calls torch.cuda.set_device for every device that it does not know.

With exp the process group and the device belong to the backend: nothing calls CUDA on another one. The simulated card
makes sure: calls of torch.cuda that would touch a device raise there.
"""

from __future__ import annotations

from tests.field.conftest import CARDS
from tests.simulators import needs_card


def test_stock_mmengine_calls_cuda(stock):
    script = """
        import os
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        from mmengine.dist import init_dist
        init_dist("pytorch", backend="gloo")
    """
    (ended,) = stock(script)
    assert ended.returncode == 1
    last = ended.printed.splitlines()[-1]
    # torch 1.10; a CPU build of recent torch; a CUDA build of it
    known = ("Found no NVIDIA driver on your system", "has no attribute '_cuda_setDevice'", "CUDA")
    assert any(text in ended.printed for text in known), last
    assert "set_device" in ended.printed


@needs_card
def test_exp_calls_none(exp):
    done = exp(*CARDS, "nproc=2", "output_dir=run")
    assert done.returncode == 0, done.stderr
    for log in (exp.path("run") / "logs").glob("rank*.log"):
        assert "CUDA device" not in log.read_text()
