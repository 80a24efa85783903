"""What task=operators and task=collectives make of what their ranks have noted."""

from __future__ import annotations

import pytest
import torch
from exp.backends.cpu import CpuBackend

from exp.checks.check import Journal, evaluate_collectives, evaluate_operators
from exp.checks.measure import exact_values
from exp.checks.operators import OperatorCheck, find_guilty
from exp.hardware.compat import TORCH_VERSION, dispatch_mode


def test_the_verdict_on_collectives_and_what_has_ended_the_process_is_left_out(tmp_path):
    path = tmp_path / "collectives.jsonl"
    lines = [
        {"name": "all_reduce fp32", "kib": 4, "seconds": 1.0, "bus_bytes_per_second": 4096.0},
        {"name": "all_reduce bf16", "kib": 4, "error": "wrong on rank 1"},
        {"name": "all_reduce fp16", "kib": 4, "crash": "hung: no end within 45 s"},
    ]
    for line in lines[:2]:
        Journal.append(path, **line)
    with path.open("a") as file:
        file.write('\n{"name": "all_reduce f')  # a line that the worker did not finish
    Journal.append(path, **lines[2])
    answer = evaluate_collectives(Journal.read(path)[0], "gloo")
    assert answer.status == "failed"
    assert "all_reduce fp16, 4 KiB: hung" in answer.finding
    assert "all_reduce bf16, 4 KiB: wrong on rank 1" in answer.finding
    assert [line["collective"] for line in answer.values["table"]] == ["all_reduce fp32"]
    assert Journal(path, 45).crashed == {"all_reduce fp16"}
    assert Journal.read(path)[0] == lines[2:]
    Journal.append(path, name="broadcast fp32", kib=4, crash="exit code 1")
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
    judged = evaluate_operators([good, line], found.get("precision", "fp32"))
    assert judged.status == verdict
    assert {row["operator"]: row["status"] for row in judged.values["table"]} == {
        "aten.add.Tensor": "equal", "aten.gelu.default": status}  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 3, 18, 256])
def test_sums_of_any_number_of_ranks_are_whole_numbers_that_bf16_has(world_size):
    parts = [exact_values(rank, world_size, 20) for rank in range(world_size)]
    total = sum(own for own, _ in parts)
    assert all((right == total).all() for _, right in parts)
    assert 0 < total.max() <= 256
    assert (parts[0][0] != parts[1][0]).all()


@pytest.mark.parametrize("suspects", ["", "g", "gd", "dz", "abg"])
@pytest.mark.parametrize("guilty", [["g"], ["dp"], ["g", "dp"], ["g", "aqz"], []])
def test_the_smallest_sets_that_are_wrong_are_found_in_few_steps(guilty, suspects):
    names, steps = "abcdefghijklmnopqrstuvwxyz", []

    def is_wrong(chosen):
        steps.append(chosen)
        return any({*group} <= {*chosen} for group in guilty)

    found = find_guilty(names, suspects, is_wrong)
    assert sorted("".join(sorted(group)) for group in found) == sorted(guilty)
    assert len(steps) <= len(suspects) + 1 + 75 * len(guilty)
    assert len(steps) <= 3 or (guilty, suspects) != (["g"], "g"), "a single one that is suspected"


@pytest.mark.skipif(TORCH_VERSION < (2, 0), reason="no fused attention")
def test_operators_of_a_step_are_compared_one_by_one_and_what_is_random_is_not(tmp_path):
    check = OperatorCheck(CpuBackend(name="cpu"), torch.device("cpu"), Journal(tmp_path / "operators.jsonl", 60))
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 2, 3, 4)
    with dispatch_mode(check):
        mixed = torch.nn.functional.scaled_dot_product_attention(layer(x), layer(x), layer(x))
        torch.nn.functional.dropout(mixed, 0.5).sum().backward()
    lines, begun = Journal.read(tmp_path / "operators.jsonl")
    table = {row["operator"]: row["status"] for row in evaluate_operators(lines, "fp32").values["table"]}
    assert begun is None
    assert {"equal", "not compared"} == set(table.values())
    attention = [status for name, status in table.items() if "attention" in name or "softmax" in name]
    assert attention
    assert set(attention) == {"equal"}
    assert {name for name, status in table.items() if status != "equal"} <= {
        "aten.bernoulli_.float", "aten.native_dropout.default"}  # fmt: skip
