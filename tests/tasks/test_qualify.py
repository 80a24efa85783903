"""task=qualify: a kit that is killed and goes on; one on cards with defects; what it leaves."""

from __future__ import annotations

import json
import math
import shlex
import time
from pathlib import Path
from textwrap import dedent

import pytest

from exp.compat import TORCH_VERSION
from exp.qualify.operator_table import judge_operators
from tests.conftest import Forked
from tests.docs.reader import lines_of
from tests.simulators import needs_current_card

PAGE = Path(__file__).parents[2] / "docs" / "qualify.md"
KIT = ["task=qualify", "nproc=2", "output_dir=kit", "task.experiments=[timebridge_small]"]
EXAMPLE = "timebridge_small"


def read(exp) -> dict:
    return json.loads((exp.path("kit") / "qualify.json").read_text())


def test_a_kit_that_is_killed_goes_on_where_it_was(exp):
    rows = 'task.rows=["operators-*-fp32",collectives]'
    arguments = [*KIT, "backend=cpu", rows, "task.soak_minutes=0", "overwrite=false"]
    # Where a secret comes in: the key of a service in the environment, which a row's own output may repeat.
    secret = {"SERVICE_TOKEN": "correct-horse-battery"}
    first = Forked(exp.folder, *arguments, **secret)
    deadline = time.monotonic() + 250
    name = f"operators-{EXAMPLE}-fp32"
    trail = exp.path("kit") / "rows" / "collectives" / "output.log"
    while not trail.exists() and first.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert first.poll() is None, first.communicate()
    first.kill()
    before = read(exp)["rows"]
    assert before[name]["verdict"] == "pass", before[name]
    assert before["collectives"]["verdict"] == "not run"
    assert before["collectives"]["started"] == 1

    done = exp(*arguments, **secret)
    assert done.returncode == 0, done.stdout + done.stderr
    kit = read(exp)
    assert kit["rows"][name] == before[name]  # not made again
    collectives = kit["rows"]["collectives"]
    assert collectives["started"] == 2
    whole = TORCH_VERSION >= (2, 0)  # before it, gloo knows no bf16
    assert collectives["verdict"] == ("pass" if whole else "warn"), collectives
    assert {line["name"] for line in collectives["values"]["lines"]} == {
        f"{what} {how}" for what in ("all_reduce", "broadcast") for how in ("fp32", "bf16")[: 1 + whole]}  # fmt: skip
    assert whole or "refused: all_reduce bf16: Invalid scalar type" in collectives["finding"]
    operators = {row["name"]: row["status"] for row in kit["rows"][name]["values"]["operators"]}
    backward = [each for each in operators if "backward" in each]
    assert backward
    assert {operators[each] for each in backward} == {"equal"}
    # What was not asked for is there, with the reason.
    assert kit["rows"]["doctor"]["finding"] == "left out by task.rows"
    page = (exp.path("kit") / "qualify.md").read_text()
    assert all(f"| {row} |" in page for row in kit["rows"])
    assert kit["verdict"] == collectives["verdict"]
    files = [file for file in exp.path("kit").rglob("*") if file.is_file()]
    assert not [file for file in files if file.suffix in (".pth", ".npz", ".yaml")]
    assert not [file for file in files if b"correct-horse-battery" in file.read_bytes()]

    refused = exp(*arguments, "nproc=3")
    assert refused.returncode == 2
    assert "holds a kit of nproc=2, this one has 3" in refused.stderr
    refused = exp(*arguments, **secret, OMP_NUM_THREADS="2")
    assert refused.returncode == 2
    assert "holds a kit of OMP_NUM_THREADS=1, this one has 2" in refused.stderr
    again = exp(*reversed(arguments), **secret)
    assert again.returncode == 0, again.stderr


def commands(kit: dict) -> dict[str, list[str]]:
    return {name: shlex.split(row["command"])[3:] for name, row in kit["rows"].items()}


def test_any_number_of_cards_has_a_batch_that_they_can_share(exp):
    wanted = ["task.experiments=[dinov3_dubai]", "task.budget_minutes=0.1", "task.small=false"]
    assert exp(*KIT, *wanted, "backend=cpu", "nproc=3").returncode == 75
    made = commands(read(exp))
    assert {row["verdict"] for row in read(exp)["rows"].values()} == {"not run"}  # the budget was spent
    batch = {name: [each for each in command if "batch_size" in each] for name, command in made.items()}
    assert batch["parity-dinov3_dubai-1"] == ["global_batch_size=8"]
    assert batch["parity-dinov3_dubai-3"] == batch["resume-dinov3_dubai-3"] == ["global_batch_size=9"]
    assert batch["soak-dinov3_dubai-3"] == ["global_batch_size=9"]
    assert [batch[f"speed-dinov3_dubai-{nproc}"] for nproc in (1, 2, 3)] == [
        ["global_batch_size=8"], ["global_batch_size=16"], ["global_batch_size=24"]]  # fmt: skip
    assert "experiment=dinov3_dubai" in made["doctor"]
    assert "experiment=dinov3_dubai" in made["collectives"]

    exp(*KIT, *wanted, "backend=cpu", "nproc=3", "batch_size=2", "accumulate=2", "overwrite=true")
    made = commands(read(exp))
    assert [name for name, command in made.items() if "batch_size=2" not in command] == []
    assert [name for name, command in made.items() if "global_batch_size" in " ".join(command)] == []


@pytest.mark.parametrize(
    ("override", "finding"),
    [
        ('task.rows=[doctor,"sped-*"]', "task.rows: no row is called sped-*; there are doctor, "),
        ("task.experiments=[nothing]", "the rows of nothing cannot be made: "),
        ("data.root=nowhere", f"the rows of {EXAMPLE} cannot be made: "),
        ("task.steps=5", "task.steps=5 must be more than 5"),
    ],
)
def test_what_no_row_can_be_made_of_is_refused_at_the_outset(exp, override, finding):
    done = exp(*KIT, "backend=cpu", override)
    assert done.returncode == 2, done.stdout + done.stderr
    assert finding in done.stderr
    assert not exp.path("kit").exists()


DEFECTS = '''
    import os
    import time

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
        if x.dtype is torch.bfloat16:
            os.abort()
        return torch.ops.aten.gelu_backward(gradient.cpu(), x.cpu(), approximate=approximate).to(x.device)


    class Defective(GcuBackend):
        """Simulated cards: a wrong operator, one that leaves the card, one that ends the process in bf16; rank 1 is
        slow, and sums of fp16 never end there."""

        rank = 0

        def worker_env(self, local_rank, local_world_size, single_node):
            self.rank = local_rank
            return super().worker_env(local_rank, local_world_size, single_node)

        def set_device(self, local_rank):
            device = super().set_device(local_rank)
            self.library = torch.library.Library("aten", "IMPL")
            self.library.impl("gelu", quick, "PrivateUse1")
            self.library.impl("mean.dim", through_the_cpu, "PrivateUse1")
            self.library.impl("gelu_backward", fatal, "PrivateUse1")
            return device

        def lacking_operators(self):
            return super().lacking_operators() - {"gelu_backward"}  # or it had a portable kernel, and no defect

        def fallbacks(self):
            return {"mean": tuple(LEFT)}

        def synchronize(self):
            super().synchronize()
            if self.rank == 1:
                time.sleep(0.05)

        def all_reduce(self, tensor):
            if self.rank == 1 and tensor.dtype is torch.float16:
                time.sleep(3000)
            super().all_reduce(tensor)
'''


@needs_current_card
def test_planted_defects_are_found_and_named(exp):
    (exp.folder / "defective.py").write_text(dedent(DEFECTS))
    choice = exp.path("my_conf") / "backend" / "defective.yaml"
    choice.parent.mkdir(parents=True)
    choice.write_text("_target_: defective.Defective\nname: defective\nsimulate: true\n")
    rows = 'task.rows=[doctor,collectives,"operators-*-fp32","operators-*-bf16","speed-*-1"]'
    arguments = ["--config-dir", "my_conf", *KIT, "backend=defective", rows, "task.row_minutes=4"]
    done = exp(*arguments, timeout=1500, PYTHONPATH=str(exp.folder))
    assert done.returncode == 1, done.stdout + done.stderr
    kit = read(exp)["rows"]
    assert kit["doctor"]["verdict"] == "warn"
    assert kit["doctor"]["finding"].startswith("burst, rank 1: ")
    operators = kit[f"operators-{EXAMPLE}-fp32"]
    assert operators["verdict"] == "fail"
    assert "aten.gelu.default wrong by" in operators["finding"]
    assert "aten.mean.dim left the card (1 calls, " in operators["finding"]
    assert [row["name"] for row in operators["values"]["operators"] if row["status"] == "wrong"] == [
        "aten.gelu.default"
    ]
    operators = kit[f"operators-{EXAMPLE}-bf16"]
    assert "aten.gelu_backward.default crashed" in operators["finding"]
    assert "SIGABRT" in operators["finding"]
    statuses = {row["name"]: row["status"] for row in operators["values"]["operators"]}
    assert statuses["aten.convolution_backward.default"] == "equal"  # which comes after it
    assert kit["collectives"]["verdict"] == "fail"
    assert kit["collectives"]["finding"].startswith("all_reduce fp16, 4 KiB: hung for 45 s")
    measured = {line["name"] for line in kit["collectives"]["values"]["lines"]}
    assert {"all_reduce fp32", "broadcast fp16"} <= measured  # before it, and after
    assert "calls and" in kit[f"speed-{EXAMPLE}-1"]["finding"]
    assert "a step leave the card, most of mean" in kit[f"speed-{EXAMPLE}-1"]["finding"]


def test_the_commands_of_the_page_are_right(exp):
    commands = lines_of(PAGE)
    assert len(commands) == 7
    for command in commands:
        _, _, _, *arguments = shlex.split(command)
        done = exp(*arguments, "--cfg", "job")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("found", "status", "verdict"),
    [
        ({"relative": 1e-7, "dtype": "float32"}, "equal", "pass"),
        ({"relative": 1e-4, "dtype": "float32"}, "off", "warn"),
        ({"relative": 1e-4, "dtype": "bfloat16"}, "equal", "pass"),
        ({"relative": 1e-2, "dtype": "float32"}, "wrong", "fail"),
        ({"relative": None, "not_finite": {"relative": "inf"}, "dtype": "float32"}, "wrong", "fail"),
        ({"relative": 1.0, "dtype": "int64"}, "wrong", "fail"),
        ({"relative": 0.0, "dtype": "float32", "left": [2, 4096]}, "left the card", "warn"),
        ({"relative": 0.0, "dtype": "float32", "left": None}, "equal", "pass"),
        ({"error": "RuntimeError: no kernel"}, "failed", "fail"),
        ({"crash": "exit code 1"}, "crashed", "fail"),
        ({"uncompared": "random"}, "not compared", "pass"),
        ({"relative": 1e-2, "dtype": "float32", "precision": "efp"}, "equal", "pass"),
    ],
)
def test_the_verdict_on_an_operator(found, status, verdict):
    good = {"name": "aten.add.Tensor", "relative": 0.0, "dtype": "float32", "detail": ""}
    precision = found.get("precision", "fp32")
    judged = judge_operators([good, {"name": "aten.gelu.default", "detail": "float32[2]", **found}], precision)
    assert judged.verdict == verdict
    assert {row["name"]: row["status"] for row in judged.values["operators"]} == {
        "aten.add.Tensor": "equal", "aten.gelu.default": status}  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 3, 8, 18, 64, 129, 256])
def test_sums_of_any_number_of_ranks_are_whole_numbers_that_bf16_has(world_size):
    from exp.qualify.collectives import addends

    parts = [addends(rank, world_size, 20) for rank in range(world_size)]
    total = sum(own for own, _ in parts)
    assert all((right == total).all() for _, right in parts)
    assert 0 < total.max() <= 256
    assert (parts[0][0] != parts[1][0]).all()


def test_what_is_secret_is_hidden_in_any_form(monkeypatch, tmp_path):
    from exp.qualify.tidy import Secrets, tidy

    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("DB_PASS", 'horse"battery')
    secrets = Secrets(["hooks=[{type: Mine, auth: 'correct-horse'}]", "author=somebody"], {"PRIVATE_KEY": "staple-1"})
    shown = {
        "a correct-horse b": "a *** b",
        r'"horse\"battery"': '"***"',
        "staple-1": "***",
        "somebody": "somebody",
        "https://me:word@host/path": "https://***@host/path",
        "/home/someone/data, /home/someone.": "~/data, ~.",
        "/mnt/home/someone/x": "/mnt/home/someone/x",
        "/home/someone-else": "/home/someone-else",
        r"at\n/home/someone/x": r"at\n~/x",
    }
    assert {text: secrets.hide_in(text) for text in shown} == shown
    (tmp_path / "output.log").write_text("staple-1")
    (tmp_path / "weights.pth").write_text("")
    tidy(tmp_path, secrets)
    assert (tmp_path / "output.log").read_text() == "***"
    assert not (tmp_path / "weights.pth").exists()


def test_a_machine_is_told_from_another():
    from exp.qualify.machine import different

    one = {"packages": {"driver": "1"}, "variables": {}, "cards": [{"index": 0, "name": "A", "uuid": "x"}]}
    assert different(one, one) is None
    assert different(one, {**one, "packages": {"driver": "2"}}) == "driver=1, this one has 2"
    assert different(one, {**one, "cards": []}) == "1 cards, this one has 0"
    other = [{"index": 0, "name": "A", "uuid": "y"}]
    assert different(one, {**one, "cards": other}) == "the card 0 A x, this one has 0 A y"


def test_a_difference_is_found_at_any_depth():
    import torch

    from exp.qualify.difference import difference

    one = torch.ones(3)
    nan = torch.tensor([1.0, math.nan, 1.0])
    assert difference((one, [one]), (one, [one.clone()]), 0.0)["relative"] == 0.0
    assert difference((nan,), (nan.clone(),), 0.0)["relative"] == 0.0
    assert difference((nan,), (one,), 0.0)["relative"] == math.inf
    assert difference((one, torch.ones(2)), (one, one), 0.0)["relative"] == math.inf
    assert difference((one, 4), (one, 2), 0.0)["relative"] == 1.0
    assert difference((one * 1.5,), (one,), 0.0)["relative"] == pytest.approx(0.5)
    assert difference((one * 1e-6,), (one * 0,), 10.0)["relative"] == pytest.approx(1e-7)  # sums that cancel out
