"""fp32 is fp32: TF32's 10-bit mantissas are used where precision=tf32 asks for them, and nowhere else."""

from __future__ import annotations

import json
from textwrap import dedent

import pytest

from exp.backends_registry import create_backend
from exp.errors import ConfigError
from tests.conftest import TINY

SWITCHES = """
    import torch
    from torch import backends

    def switches():
        found = {"older": [backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32]}
        if hasattr(torch, "get_float32_matmul_precision"):
            found["matmul"] = torch.get_float32_matmul_precision()
        if hasattr(backends.cudnn, "conv"):
            places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
            found["newer"] = sorted({place.fp32_precision for place in places})
        return found
"""


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_every_switch_of_torch_says_what_precision_says(ranks, name):
    # A build for the CPU has the switches, too; each step must also undo what came before it.
    script = f"""{SWITCHES}
    import os
    seen = []
    for precision in ("fp32", "tf32", "bf16", "tf32", "fp16"):
        backend.set_precision(precision)
        seen.append([switches(), os.environ.get("HIPBLASLT_ALLOW_TF32")])
    print(json.dumps(seen))
    """
    (seen,) = ranks(script, backend=name)
    for found, variable in seen:
        on = found == seen[1][0]
        assert found["older"] == [on, on]
        assert found.get("newer") in (None, ["tf32" if on else "ieee"])
        assert found.get("matmul") in (None, "high" if on else "highest")
        assert variable == (str(int(on)) if name == "rocm" else None)
    assert [found == seen[1][0] for found, _ in seen] == [False, True, False, True, False]


def test_a_run_sets_the_switches_before_its_first_product(exp):
    (exp.folder / "looks.py").write_text(
        dedent(SWITCHES)
        + dedent("""
        import json
        from mmengine.hooks import Hook
        from exp.backends.cuda import CudaBackend
        from exp.backends.cpu import CpuBackend

        class Cards(CpuBackend):
            precisions = ("fp32", "bf16", "tf32")

            def set_precision(self, precision):
                CudaBackend(name="cards").set_precision(precision)

        class Look(Hook):
            def before_train(self, runner):
                open(f"{runner.precision}.json", "w").write(json.dumps(switches()))
        """)
    )
    (exp.folder / "conf" / "backend").mkdir(parents=True)
    (exp.folder / "conf" / "backend" / "cards.yaml").write_text("_target_: looks.Cards\nname: cards\n")
    hook = ["plugins=[looks]", "hooks=[{type: looks.Look}]"]
    mine = ["--config-dir", "conf", "backend=cards", *TINY[1:], "max_steps=1", *hook]
    for precision in ("fp32", "tf32"):
        done = exp(*mine, f"precision={precision}", f"output_dir={precision}")
        assert done.returncode == 0, done.stderr
        assert exp.result(precision)["precision"] == precision
        assert json.loads((exp.folder / f"{precision}.json").read_text())["older"] == [precision == "tf32"] * 2


@pytest.mark.parametrize(("value", "precision"), [("1", "fp32"), ("0", "tf32")])
def test_a_variable_that_overrules_torch_is_refused(monkeypatch, value, precision):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
    backend = create_backend({"_target_": "cuda", "name": "cuda"})
    with pytest.raises(ConfigError, match=f"NVIDIA_TF32_OVERRIDE={value} overrules precision={precision}; unset it"):
        backend.set_precision(precision)
