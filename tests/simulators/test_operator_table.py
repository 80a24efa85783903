"""The script that makes the table of operators of a release of the vendor's plug-in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
NATIVE = """
supported:
- {name: add.out}
- {name: median.dim_values}
- {name: angle, disable: true}
- {name: gelu_backward.grad_input}
- {name: scatter_reduce.two_out}
"""
SENT = """
fallback:
- {name: gelu_backward.grad_input, s60: all}
- {name: scatter_reduce.two_out, s60: [{reduce: "prod,mean"}], l600: all}
"""


@pytest.mark.skipif(torch.__version__.startswith("1."), reason="the plug-in for torch 2 has these lists")
def test_overloads_are_sorted_by_what_the_lists_have(tmp_path):
    (tmp_path / "codegen").mkdir()
    (tmp_path / "codegen" / "gcu_native_functions.yaml").write_text(NATIVE)
    (tmp_path / "codegen" / "gcu_op_fallback.yaml").write_text(SENT)
    script = [sys.executable, str(ROOT / "simulators" / "gcu" / "operator_table.py"), str(tmp_path)]
    printed = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    sections = (section.split("]\n") for section in printed.split("\n[")[1:])
    found = {heading: set(names.split()) for heading, names in sections}
    assert found["card"] >= {"add.out", "add.Tensor", "add_.Tensor", "median.dim", "gelu_backward", "linear"}
    assert found["cpu"] >= {"median", "angle", "threshold_backward"}
    assert not found["card"] & found["cpu"]
    assert found["cpu on s60"] == {"gelu_backward", "gelu_backward.grad_input"}
    assert "scatter_reduce.two" in found["cpu on l600"] & found["cpu on s60 if reduce=prod,mean"]
