"""task=qualify: a suite that is killed and goes on; one on cards with defects; what it leaves."""

from __future__ import annotations

import json
import time
from textwrap import dedent

import pytest
import torch
from exp.backends.cpu import CpuBackend

from exp.checks.check import Journal, judge_collectives, judge_operators
from exp.checks.measure import addends
from exp.checks.operators import OperatorCheck
from exp.hardware.compat import TORCH_VERSION, every_operator
from tests.conftest import Forked
from tests.simulators import needs_current_card

EXAMPLE = "timebridge_small"
SUITE = ["task=qualify", "nproc=2", "output_dir=suite", f"task.experiments=[{EXAMPLE}]"]


def read(exp) -> dict:
    return json.loads((exp.path("suite") / "qualify.json").read_text())


def test_a_suite_that_is_killed_goes_on_where_it_was(exp):
    rows = 'task.rows=["operators-*-fp32",collectives]'
    arguments = [*SUITE, "backend=cpu", rows, "overwrite=false"]
    first, deadline = Forked(exp.folder, *arguments), time.monotonic() + 250
    while not (exp.path("suite") / "rows" / "collectives" / "output.log").exists():
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first.kill()
    name, before = f"operators-{EXAMPLE}-fp32", read(exp)["rows"]
    assert before[name]["status"] == "ok", before[name]
    assert before["collectives"]["status"] == "skipped"

    done = exp(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    suite = read(exp)
    assert suite["rows"][name] == before[name]  # not made again
    operators = {row["operator"]: row["status"] for row in suite["rows"][name]["values"]["table"]}
    assert {status for each, status in operators.items() if "backward" in each} == {"equal"}
    collectives, whole = suite["rows"]["collectives"], TORCH_VERSION >= (2, 0)  # before it, gloo knows no bf16
    assert suite["verdict"] == collectives["status"] == ("ok" if whole else "warning"), collectives
    assert whole or "refused: all_reduce bf16" in collectives["finding"]
    assert "all_reduce fp32" in {line["collective"] for line in collectives["values"]["table"]}
    assert suite["rows"]["doctor"]["finding"] == "left out by task.rows"
    assert "| operators-timebridge\\_small-fp32 |" in (exp.path("suite") / "qualify.md").read_text()
    files = [file for file in exp.path("suite").rglob("*") if file.is_file()]
    assert not [file for file in files if file.suffix in (".pth", ".npz")]

    refused = exp(*arguments, "nproc=3", OMP_NUM_THREADS="2")
    assert refused.returncode == 2
    assert "nproc=2" in refused.stderr
    assert "OMP_NUM_THREADS=1" in refused.stderr


DEFECTS = '''
    import os
    from dataclasses import replace

    import torch
    from exp.backends.gcu import GcuBackend

    LEFT = [0, 0]


    def quick(x, approximate="none"):
        return x * torch.sigmoid(1.702 * x)


    def through_the_cpu(x, dim=None, keepdim=False, dtype=None):
        LEFT[0] += 1
        LEFT[1] += 2 * x.numel() * x.element_size()
        return x.cpu().mean(dim, keepdim, dtype=dtype).to(x.device)


    def fatal(gradient, x, approximate="none"):
        os.abort()


    class Defective(GcuBackend):
        """Simulated cards: a wrong operator, one that leaves the card, one that ends the process."""

        def set_device(self, local_rank):
            device = super().set_device(local_rank)
            self.library = torch.library.Library("aten", "IMPL")
            self.library.impl("gelu", quick, "PrivateUse1")
            self.library.impl("mean.dim", through_the_cpu, "PrivateUse1")
            self.library.impl("gelu_backward", fatal, "PrivateUse1")
            return device

        @property
        def capabilities(self):
            known = super().capabilities
            lacking = known.lacking_operators - {"gelu_backward"}  # or it had a portable kernel, and no defect
            return replace(known, lacking_operators=lacking)

        def fallbacks(self):
            return {"mean": tuple(LEFT)}
'''


@needs_current_card
def test_planted_defects_are_found_and_named(exp):
    (exp.folder / "defective.py").write_text(dedent(DEFECTS))
    choice = exp.path("my_conf") / "backend" / "defective.yaml"
    choice.parent.mkdir(parents=True)
    choice.write_text("_target_: defective.Defective\nname: defective\nsimulate: true\n")
    arguments = ["--config-dir", "my_conf", *SUITE, "backend=defective", 'task.rows=["operators-*-fp32"]']
    done = exp(*arguments, timeout=600, PYTHONPATH=str(exp.folder))
    assert done.returncode == 1, done.stdout + done.stderr
    row = read(exp)["rows"][f"operators-{EXAMPLE}-fp32"]
    assert row["status"] == "failed"
    for finding in (
        "aten.gelu_backward.default crashed", "SIGABRT", "aten.gelu.default wrong (",
        "aten.mean.dim left the card (1 calls, ",
    ):  # fmt: skip
        assert finding in row["finding"]
    found = {line["operator"]: line["status"] for line in row["values"]["table"]}
    assert [name for name, status in found.items() if status == "wrong"] == ["aten.gelu.default"]
    assert found["aten.convolution_backward.default"] == "equal"  # which comes after the crash
    assert "| aten.gelu.default | wrong |" in (exp.path("suite") / "qualify.md").read_text()


def test_the_verdict_on_collectives_and_what_has_ended_the_process_is_left_out(tmp_path):
    path = tmp_path / "collectives.jsonl"
    lines = [
        {"name": "all_reduce fp32", "kib": 4, "seconds": 1.0, "bus_bytes_per_second": 4096.0},
        {"name": "all_reduce bf16", "kib": 4, "error": "wrong on rank 1"},
        {"name": "all_reduce fp16", "kib": 4, "crash": "hung: no end within 45 s"},
    ]
    for line in lines[:2]:
        Journal.note(path, **line)
    with path.open("a") as file:
        file.write('\n{"name": "all_reduce f')  # a line that the worker did not finish
    Journal.note(path, **lines[2])
    answer = judge_collectives(Journal.read(path)[0], "gloo")
    assert answer.status == "failed"
    assert "all_reduce fp16, 4 KiB: hung" in answer.finding
    assert "all_reduce bf16, 4 KiB: wrong on rank 1" in answer.finding
    assert [line["collective"] for line in answer.values["table"]] == ["all_reduce fp32"]
    assert Journal(path, 45).crashed == {"all_reduce fp16"}
    assert Journal.read(path)[0] == lines[2:]
    Journal.note(path, name="broadcast fp32", kib=4, crash="exit code 1")
    assert Journal(path, 45).crashed == {"all_reduce fp16", "broadcast fp32"}  # both are left out the next time


@pytest.mark.parametrize(
    ("found", "status", "verdict"),
    [
        ({"relative": 1e-7}, "equal", "ok"),
        ({"relative": 1e-4}, "off", "warning"),
        ({"relative": 1e-2}, "wrong", "failed"),
        ({"relative": 1.0, "dtype": "int64", "left": None}, "wrong", "failed"),
        ({"relative": 1e-2, "precision": "efp"}, "equal", "ok"),
        ({"relative": None, "not_finite": {"relative": "inf"}}, "wrong", "failed"),
        ({"relative": 0.0, "left": [2, 4096]}, "left the card", "warning"),
        ({"error": "RuntimeError: no kernel"}, "failed", "failed"),
        ({"crash": "exit code 1"}, "crashed", "failed"),
        ({"uncompared": "random"}, "not compared", "ok"),
    ],
)
def test_the_verdict_on_an_operator(found, status, verdict):
    good = {"name": "aten.add.Tensor", "relative": 0.0, "dtype": "float32", "detail": ""}
    line = {"name": "aten.gelu.default", "detail": "float32[2]", "dtype": "float32", **found}
    judged = judge_operators([good, line], found.get("precision", "fp32"))
    assert judged.status == verdict
    assert {row["operator"]: row["status"] for row in judged.values["table"]} == {
        "aten.add.Tensor": "equal", "aten.gelu.default": status}  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 3, 18, 256])
def test_sums_of_any_number_of_ranks_are_whole_numbers_that_bf16_has(world_size):
    parts = [addends(rank, world_size, 20) for rank in range(world_size)]
    total = sum(own for own, _ in parts)
    assert all((right == total).all() for _, right in parts)
    assert 0 < total.max() <= 256
    assert (parts[0][0] != parts[1][0]).all()


@pytest.mark.skipif(TORCH_VERSION < (2, 0), reason="no fused attention")
def test_operators_of_a_step_are_compared_one_by_one_and_what_is_random_is_not(tmp_path):
    check = OperatorCheck(CpuBackend(name="cpu"), torch.device("cpu"), Journal(tmp_path / "operators.jsonl", 60))
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 2, 3, 4)
    with every_operator(check):
        mixed = torch.nn.functional.scaled_dot_product_attention(layer(x), layer(x), layer(x))
        torch.nn.functional.dropout(mixed, 0.5).sum().backward()
    lines, begun = Journal.read(tmp_path / "operators.jsonl")
    table = {row["operator"]: row["status"] for row in judge_operators(lines, "fp32").values["table"]}
    assert begun is None
    assert {"equal", "not compared"} == set(table.values())
    attention = [status for name, status in table.items() if "attention" in name or "softmax" in name]
    assert attention
    assert set(attention) == {"equal"}
    assert {name for name, status in table.items() if status != "equal"} <= {
        "aten.bernoulli_.float", "aten.native_dropout.default"}  # fmt: skip
