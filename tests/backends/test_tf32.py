"""fp32 is fp32: TF32's 10-bit mantissas are used where precision=tf32 asks for them, and nowhere else."""

from __future__ import annotations

import pytest

from exp.errors import ConfigError
from tests.backends import made
from tests.conftest import TINY


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_every_switch_of_torch_says_what_precision_says(ranks, name):
    # A build for the CPU has the switches, too; each step must also undo what came before it.
    script = """
        import os, torch
        from torch import backends
        places = [getattr(backends.cudnn, name) for name in ("conv", "rnn") if hasattr(backends.cudnn, name)]
        places += [backends.cuda.matmul] * bool(places)
        seen = []
        for precision in ("fp32", "tf32", "bf16", "tf32", "fp16"):
            backend.set_precision(precision)
            switches = [backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32]
            switches += [{"tf32": True, "ieee": False}[place.fp32_precision] for place in places]
            if hasattr(torch, "get_float32_matmul_precision"):
                switches += [{"high": True, "highest": False}[torch.get_float32_matmul_precision()]]
            seen.append([sorted(set(switches)), os.environ.get("HIPBLASLT_ALLOW_TF32")])
        print(json.dumps(seen))
    """
    on, off = ("1", "0") if name == "rocm" else (None, None)
    expected = [[[precision == "tf32"], on if precision == "tf32" else off] for precision in ("fp32", "tf32", "bf16")]
    assert ranks(script, backend=name) == [[*expected, expected[1], expected[0]]]


def test_a_run_sets_the_switches_before_its_first_product(exp):
    (exp.folder / "looks.py").write_text("""
from mmengine.hooks import Hook
from torch import backends
from exp.backends.cpu import CpuBackend
from exp.backends.cuda import CudaBackend

class Cards(CpuBackend):
    def set_precision(self, precision):
        CudaBackend(name="cards").set_precision(precision)

class Look(Hook):
    def before_train(self, runner):
        assert not backends.cuda.matmul.allow_tf32 and not backends.cudnn.allow_tf32  # which torch has on by default
""")
    hook = ["plugins=[looks]", "hooks=[{type: looks.Look}]"]
    done = exp(*TINY, "backend._target_=looks.Cards", "max_steps=1", *hook, "output_dir=run")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("value", "precision"), [("1", "fp32"), ("0", "tf32")])
def test_a_variable_that_overrules_torch_is_refused(monkeypatch, value, precision):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
    with pytest.raises(ConfigError, match=f"NVIDIA_TF32_OVERRIDE={value} overrules precision={precision}"):
        made("cuda").set_precision(precision)
