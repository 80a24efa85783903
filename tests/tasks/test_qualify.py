"""task=qualify: a kit that is killed and goes on; one on cards with defects; what it leaves."""

from __future__ import annotations

import json
import math
import shlex
import time
from textwrap import dedent

import pytest
import torch
from exp.backends.cpu import CpuBackend

from exp.checks.check import Journal, read_journal
from exp.checks.collectives import addends
from exp.checks.machine import Secrets, different, machine, tidy
from exp.checks.operator_table import judge_operators
from exp.checks.operators import difference
from exp.hardware.compat import TORCH_VERSION
from tests.conftest import Forked
from tests.simulators import needs_current_card

EXAMPLE = "timebridge_small"
KIT = ["task=qualify", "nproc=2", "output_dir=kit", f"task.experiments=[{EXAMPLE}]"]


def read(exp) -> dict:
    return json.loads((exp.path("kit") / "qualify.json").read_text())


def test_a_kit_that_is_killed_goes_on_where_it_was(exp):
    rows = 'task.rows=["operators-*-fp32",collectives]'
    arguments = [*KIT, "backend=cpu", rows, "task.soak_minutes=0", "overwrite=false"]
    # Where a secret comes in: the key of a service in the environment, which a row's own output may repeat.
    secret = {"SERVICE_TOKEN": "correct-horse-battery"}
    first, deadline = Forked(exp.folder, *arguments, **secret), time.monotonic() + 250
    while not (exp.path("kit") / "rows" / "collectives" / "output.log").exists():
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first.kill()
    name, before = f"operators-{EXAMPLE}-fp32", read(exp)["rows"]
    assert before[name]["status"] == "ok", before[name]
    assert (before["collectives"]["status"], before["collectives"]["started"]) == ("skipped", 1)

    done = exp(*arguments, **secret)
    assert done.returncode == 0, done.stdout + done.stderr
    kit = read(exp)
    assert kit["rows"][name] == before[name]  # not made again
    operators = {row["name"]: row["status"] for row in kit["rows"][name]["values"]["operators"]}
    assert {status for each, status in operators.items() if "backward" in each} == {"equal"}
    collectives, whole = kit["rows"]["collectives"], TORCH_VERSION >= (2, 0)  # before it, gloo knows no bf16
    assert collectives["started"] == 2
    assert kit["verdict"] == collectives["status"] == ("ok" if whole else "warning"), collectives
    assert whole or "refused: all_reduce bf16" in collectives["finding"]
    assert {"all_reduce fp32", "broadcast fp32"} <= {line["name"] for line in collectives["values"]["lines"]}
    assert kit["rows"]["doctor"]["finding"] == "left out by task.rows"
    assert f"| {name} |" in (exp.path("kit") / "qualify.md").read_text()
    files = [file for file in exp.path("kit").rglob("*") if file.is_file()]
    assert not [file for file in files if file.suffix in (".pth", ".npz", ".yaml")]
    assert not [file for file in files if b"correct-horse-battery" in file.read_bytes()]

    for more, extra, named in ((["nproc=3"], {}, "nproc=2"), ([], {"OMP_NUM_THREADS": "2"}, "OMP_NUM_THREADS=1")):
        refused = exp(*arguments, *more, **secret, **extra)
        assert refused.returncode == 2
        assert named in refused.stderr
    again = exp(*reversed(arguments), **secret)
    assert again.returncode == 0, again.stderr


def test_any_number_of_cards_has_a_batch_that_they_can_share(exp):
    def batches(*more):
        """The settings of batches of each row; none is run, since the budget is spent."""
        wanted = ["task.experiments=[dinov3_dubai]", "task.budget_minutes=0.1", "task.small=false", "overwrite=true"]
        assert exp(*KIT, *wanted, "backend=cpu", "nproc=3", *more).returncode == 75
        made = {name: shlex.split(row["command"]) for name, row in read(exp)["rows"].items()}
        return {name: [each for each in command if "batch_size=" in each] for name, command in made.items()}

    shared = batches()
    assert {row["status"] for row in read(exp)["rows"].values()} == {"skipped"}
    for row, number in (("parity-{}-1", 8), ("parity-{}-3", 9), ("resume-{}-3", 9), ("soak-{}-3", 9),
                        ("speed-{}-1", 8), ("speed-{}-2", 16), ("speed-{}-3", 24)):  # fmt: skip
        assert shared[row.format("dinov3_dubai")] == [f"global_batch_size={number}"], row
    own = batches("batch_size=2", "accumulate=2")
    assert {tuple(each) for each in own.values()} == {("batch_size=2",)}


def test_what_no_row_can_be_made_of_is_refused_at_the_outset(exp):
    for override, named in (
        ('task.rows=[doctor,"sped-*"]', "task.rows: no row is called sped-*"),
        ("data.root=nowhere", f"the rows of {EXAMPLE}"),
        ("task.steps=5", "task.steps=5"),
    ):
        done = exp(*KIT, "backend=cpu", override)
        assert (done.returncode, named in done.stderr) == (2, True), done.stdout + done.stderr
        assert not exp.path("kit").exists()


DEFECTS = '''
    import os
    import time
    from dataclasses import replace

    import torch
    from exp.backends.gcu import GcuBackend
    from exp.hardware.collectives import Collectives

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


    class Sums(Collectives):
        def all_reduce(self, tensor):
            if os.environ["RANK"] == "1" and tensor.dtype is torch.float16:
                time.sleep(3000)
            super().all_reduce(tensor)


    class Defective(GcuBackend):
        """Simulated cards: a wrong operator, one that leaves the card, one that ends the process in bf16; rank 1 is
        slow, and sums of fp16 never end there."""

        collectives = Sums("cpu:gloo,gcu:eccl")
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

        @property
        def capabilities(self):
            known = super().capabilities
            lacking = known.lacking_operators - {"gelu_backward"}  # or it had a portable kernel, and no defect
            return replace(known, lacking_operators=lacking)

        def fallbacks(self):
            return {"mean": tuple(LEFT)}

        def synchronize(self):
            super().synchronize()
            if self.rank == 1:
                time.sleep(0.05)

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
    single, half, speed = f"operators-{EXAMPLE}-fp32", f"operators-{EXAMPLE}-bf16", f"speed-{EXAMPLE}-1"
    assert [kit[name]["status"] for name in ("doctor", single, half, "collectives")] == ["warning", *["failed"] * 3]
    for name, finding in (
        ("doctor", "burst, rank 1: "),
        (single, "aten.gelu.default wrong by"),
        (single, "aten.mean.dim left the card (1 calls, "),
        (half, "aten.gelu_backward.default crashed"),
        (half, "SIGABRT"),
        ("collectives", "all_reduce fp16, 4 KiB: hung for 45 s"),
        (speed, "a step leave the card, most of mean"),
    ):
        assert finding in kit[name]["finding"]
    found = {name: {row["name"]: row["status"] for row in kit[name]["values"]["operators"]} for name in (single, half)}
    assert [name for name, status in found[single].items() if status == "wrong"] == ["aten.gelu.default"]
    assert found[half]["aten.convolution_backward.default"] == "equal"  # which comes after the crash
    measured = {line["name"] for line in kit["collectives"]["values"]["lines"]}
    assert {"all_reduce fp32", "broadcast fp16"} <= measured  # before what hangs, and after


@pytest.mark.parametrize(
    ("found", "status", "verdict"),
    [
        ({"relative": 1e-7}, "equal", "ok"),
        ({"relative": 1e-4}, "off", "warning"),
        ({"relative": 1e-2}, "wrong", "failed"),
        ({"relative": 1e-4, "dtype": "bfloat16"}, "equal", "ok"),
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
    assert {row["name"]: row["status"] for row in judged.values["operators"]} == {
        "aten.add.Tensor": "equal", "aten.gelu.default": status}  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 3, 18, 256])
def test_sums_of_any_number_of_ranks_are_whole_numbers_that_bf16_has(world_size):
    parts = [addends(rank, world_size, 20) for rank in range(world_size)]
    total = sum(own for own, _ in parts)
    assert all((right == total).all() for _, right in parts)
    assert 0 < total.max() <= 256
    assert (parts[0][0] != parts[1][0]).all()


def test_what_is_secret_is_hidden_in_any_form(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("DB_PASS", 'horse"battery')
    secrets = Secrets(["hooks=[{type: Mine, auth: 'correct-horse'}]", "author=somebody"], {"PRIVATE_KEY": "staple-1"})
    shown = {
        "a correct-horse b": "a *** b",
        r'"horse\"battery"': '"***"',
        "https://me:word@host/path": "https://***@host/path",
        "/home/someone/data, /home/someone.": "~/data, ~.",
        "/mnt/home/someone/x": "/mnt/home/someone/x",
        "/home/someone-else": "/home/someone-else",
        r"at\n/home/someone/x": r"at\n~/x",
    }
    assert {text: secrets.hide_in(text) for text in shown} == shown
    (tmp_path / "output.log").write_text("staple-1")
    (tmp_path / "weights.pth").touch()
    tidy(tmp_path, secrets)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"output.log": "***"}


def test_a_machine_is_told_from_another(monkeypatch):
    class Card(CpuBackend):
        def packages(self):
            return {"driver": self.options["driver"]}

    monkeypatch.setenv("RANK", "3")  # others each time
    card = {"index": 0, "name": "A", "uuid": "x", "utilisation_percent": 3}

    def facts(driver, *cards):
        return machine(Card(name="card", options={"driver": driver}), cards)

    one = facts("1", card)
    assert different(one, facts("1", {**card, "utilisation_percent": 9})) is None
    assert "driver=1" in different(one, facts("2", card))
    assert "card 0=A x, this one has None" in different(one, facts("1"))
    assert "card 0=A x, this one has A y" in different(one, facts("1", {**card, "uuid": "y"}))


def test_a_journal_names_what_was_begun_and_loses_no_line_to_a_full_disk(tmp_path):
    journal = Journal(tmp_path / "folder" / "journal.jsonl")
    journal.begin("one")
    journal.end("one", found=1)
    (tmp_path / "folder").rename(tmp_path / "away")  # stands for a disk that takes nothing
    journal.begin("two")
    assert journal.error is not None
    (tmp_path / "away").rename(tmp_path / "folder")
    assert journal.flush()
    with journal.path.open("ab") as file:
        file.write(b'{"name": "thr')
    ended, begun = read_journal(journal.path)
    assert (ended, begun["name"]) == ([{"name": "one", "found": 1}], "two")


def test_a_difference_is_found_at_any_depth():
    one, nan = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    for ours, theirs, floor, relative in (
        ((one, [nan]), (one, [nan.clone()]), 0.0, 0.0),
        ((nan,), (one,), 0.0, math.inf),
        ((one, torch.ones(2)), (one, one), 0.0, math.inf),
        ((one, 4), (one, 2), 0.0, 1.0),
        ((one * 1.5,), (one,), 0.0, 0.5),
        ((one * 1e-6,), (one * 0,), 10.0, 1e-7),  # sums that cancel out
    ):
        assert difference(ours, theirs, floor)["relative"] == pytest.approx(relative)
