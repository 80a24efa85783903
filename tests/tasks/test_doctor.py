"""The doctor, through the launcher of a real job: on healthy ranks, and on ranks that are ill in one way each."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from exp.backends._monitor import reading
from exp.backends.cpu import CpuBackend

from exp.doctor.operator_check import check_operators
from exp.doctor.record import CHECKS
from tests.simulators import needs_card, needs_current_card

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 45
"""Where a rank does not come: short, but longer than the ranks of a busy machine are apart when they start."""


class Examined:
    """What the doctor said, wrote and returned."""

    def __init__(self, done, folder: Path, seconds: float) -> None:
        self.code = done.returncode
        self.text = done.stdout
        self.errors = done.stderr
        self.seconds = seconds
        path = folder / "doctor.json"
        self.report = json.loads(path.read_text()) if path.exists() else {}
        path = folder / "result.json"
        self.result = json.loads(path.read_text()) if path.exists() else {}

    def failures(self) -> dict[str, list[int]]:
        """Ranks by the check that they failed."""
        found: dict[str, list[int]] = {}
        for finding in self.report["findings"]:
            if finding["status"] == "failed":
                found.setdefault(finding["check"], []).extend(finding["ranks"])
        return found

    def check(self, rank: int, name: str) -> dict:
        return next(check for check in self.report["ranks"][rank]["checks"] if check["name"] == name)


@pytest.fixture
def doctor(exp):
    """Runs the doctor; backends of tests.tasks.sick are ill as ``sick`` says, by local rank."""
    choices = exp.path("my_conf") / "backend"
    choices.mkdir(parents=True)
    (choices / "sick.yaml").write_text("_target_: tests.tasks.sick.SickBackend\nname: sick\n")
    (choices / "sick_cards.yaml").write_text("_target_: tests.tasks.sick.SickCards\nname: sick_cards\nsimulate: true\n")

    def run(*arguments: str, sick=None, output: str = "run", timeout_s: int = 60, **environment) -> Examined:
        started = time.monotonic()
        done = exp(
            *("--config-dir", "my_conf", "task=doctor", f"output_dir={output}", "task.burst_s=0.3"),
            f"task.timeout_s={timeout_s}",
            *arguments,
            **{"PYTHONPATH": str(ROOT), "SICK": json.dumps(sick or {}), **environment},
        )
        return Examined(done, exp.path(output), time.monotonic() - started)

    return run


def test_two_healthy_ranks(doctor):
    examined = doctor("backend=cpu", "launcher=torchrun", "nproc=2")
    assert examined.code == 0, examined.text
    assert examined.errors == ""
    report = examined.report
    assert report["verdict"] == "ok"
    assert report["process_group"] == "gloo"
    assert [rank["finished"] for rank in report["ranks"]] == [True, True]
    for rank in report["ranks"]:
        assert [check["name"] for check in rank["checks"]] == list(CHECKS)
        assert {check["status"] for check in rank["checks"]} == {"ok"}
    assert examined.check(1, "burst")["values"]["flops"] > 1e6
    assert "gradients are the mean over 2 ranks" in examined.check(0, "ddp")["finding"]
    lines = examined.text.splitlines()
    assert [line.split()[0] for line in lines[5:7]] == ["0", "1"], examined.text
    assert lines[-1].startswith("OK: 2 processes work together on cpu")
    assert lines[-1].endswith("run/doctor.json")
    assert len(lines) == 9
    result = examined.result
    assert (result["status"], result["task"], result["metric"], result["error"]) == ("completed", "doctor", None, None)
    assert len(result["devices"]) == 2


@pytest.mark.slow
def test_one_process_is_examined_in_a_process_of_its_own(doctor, exp):
    examined = doctor("backend=cpu")
    assert examined.code == 0, examined.text
    assert examined.report["world_size"] == 1
    assert examined.text.splitlines()[-1].startswith("OK: 1 process works on cpu")
    assert (exp.path("run") / "logs" / "agent.log").is_file()


@pytest.mark.slow
def test_shared_cards_and_missing_data_are_findings_not_the_end(doctor, tmp_path):
    examined = doctor("backend=sick", "nproc=3", f"data.root={tmp_path}", sick={0: "shares", 2: "shares"})
    assert examined.code == 1
    assert examined.failures() == {"cards": [0, 2], "data": [0, 1, 2]}, examined.text
    assert "failed: cards, ranks 0, 2: ranks 0, 2 share one card: card 0 on " in examined.text
    assert "do: give each rank its own" in examined.text
    assert "failed: data, all ranks: " in examined.text
    assert "ETTh1.csv" in examined.text
    assert examined.check(1, "group")["finding"] == "ranks 0, 2 failed 'cards'"
    assert examined.check(1, "burst")["status"] == "ok"
    assert (examined.result["status"], examined.result["error"]["rank"]) == ("failed", 0)
    # What is wrong is seen without a wide terminal, too.
    assert all(len(line) <= 100 for line in examined.text.splitlines()[3:8])


@pytest.mark.slow
def test_a_card_too_few_then_a_rank_that_never_arrives(doctor):
    examined = doctor("backend=sick", "nproc=2", sick={1: "no card"})
    assert examined.code == 1
    assert examined.failures() == {"device": [1]}, examined.text
    assert "failed: device, rank 1: local_rank 1 has no card: torch sees 1\n  do: lower nproc\n" in examined.text
    # In the same folder: nothing of the earlier examination may be taken for this one's.
    examined = doctor("backend=sick", "nproc=2", sick={1: "never starts"}, timeout_s=TIMEOUT_S)
    assert examined.code == 1
    assert examined.failures() == {"ranks": [1]}, examined.text
    assert f"failed: ranks, rank 1: never arrived: it left no record within {TIMEOUT_S} s" in examined.text
    assert "rank 1 never arrived" in examined.check(0, "ranks")["finding"]
    assert examined.seconds < TIMEOUT_S + 120  # three interpreters start, on a slow machine


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_stack(doctor, exp):
    examined = doctor("backend=sick", "nproc=2", sick={1: "hangs"}, timeout_s=TIMEOUT_S)
    assert examined.code == 1
    assert examined.failures() == {"all_reduce": [1]}, examined.text
    assert f"failed: all_reduce, rank 1: hung in 'all_reduce': no end within {TIMEOUT_S} s" in examined.text
    assert "in synchronize" in (exp.path("run") / "logs" / "rank1.log").read_text()
    assert examined.report["ranks"][0]["verdict"] == "skipped"
    assert examined.seconds < TIMEOUT_S + 120


@pytest.mark.slow
@pytest.mark.parametrize("other", ["", "never starts"])  # it is ended with the job, wherever it is by then
def test_a_rank_that_dies_is_named(doctor, other):
    examined = doctor("backend=sick", "nproc=2", sick={0: other, 1: "dies"})
    assert examined.code == 1
    assert examined.failures() == {"device": [1]}, examined.text
    assert examined.report["ranks"][0]["verdict"] == "skipped"
    assert "rank 1: killed by SIGKILL (out of memory, or kill -9) in 'device'" in examined.text


@pytest.mark.slow
def test_wrong_sums_are_the_failure_of_the_rank_that_has_them(doctor):
    examined = doctor("backend=sick", "nproc=2", sick={1: "adds up wrong"})
    assert examined.code == 1
    assert examined.failures() == {"all_reduce": [1]}, examined.text
    assert "the sum of 1 to 2 is 3, but 4 on cpu" in examined.text


@pytest.mark.slow
def test_ranks_that_are_ill_do_not_hide_each_other(doctor, tmp_path):
    (tmp_path / "monitor.json").write_text(
        json.dumps([reading(0, utilisation_percent=98), reading(1, utilisation_percent=0, state="Sleep")])
    )
    sick = {0: "slow", 1: "full", 2: "breaks", 3: "other library"}
    examined = doctor("backend=sick", "nproc=4", sick=sick, SICK_MONITOR=str(tmp_path / "monitor.json"))
    assert examined.code == 1
    failures = {"memory": [1], "utilisation": [1], "autocast": [2], "burst": [2]}
    assert examined.failures() == failures, examined.text
    assert "failed: memory, rank 1: 1 MiB free of 8.0 GiB" in examined.text
    assert "failed: autocast, rank 2: RuntimeError: the driver says no\n" in examined.text
    assert "Traceback" not in examined.text + examined.errors
    assert "card idle while it should work: 0 % (Sleep)" in examined.text
    assert "warning: burst, rank 0: " in examined.text
    assert "warning: packages, rank 3: library 2 (rank 0: 1)" in examined.text
    assert " 98 % " in examined.text


@pytest.mark.slow
@pytest.mark.parametrize(("size", "words"), [("256k", "no space: "), ("16k", "No space left on device")])
def test_a_full_disk(doctor, tmp_path, size, words):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    try:
        examined = doctor("backend=cpu", output="disk/run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert examined.code == 1
    assert words in examined.text + examined.errors
    assert str(disk / "run") in examined.text + examined.errors
    assert "set output_dir" in examined.text + examined.errors
    if examined.report:
        assert examined.failures() == {"output": [0]}
        assert examined.check(0, "ddp")["status"] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["backend=gcu"], 3, "backend=gcu is not available"),
        (["backend=cpu", "task.timeout_s=0"], 2, "task.timeout_s=0"),
        (["backend=cpu", "task.timeout_s=soon"], 2, "soon"),
    ],
)
def test_what_no_rank_can_report_is_told_before_any_starts(exp, arguments, code, words):
    done = exp("task=doctor", *arguments)
    assert done.returncode == code
    assert words in done.stderr.splitlines()[0]
    assert not list(exp.path("outputs").glob("*/*"))


@needs_card
@pytest.mark.slow
def test_simulated_cards(doctor):
    examined = doctor("backend=gcu", "backend.simulate=true", "nproc=3", timeout_s=120)
    assert examined.code == 0, examined.text
    assert examined.report["simulated"]
    assert {check["status"] for rank in examined.report["ranks"] for check in rank["checks"]} == {"ok"}
    assert len({examined.check(rank, "device")["values"]["identity"] for rank in range(3)}) == 3
    assert "eccl" in examined.report["process_group"]
    assert examined.text.startswith("SIMULATED")
    assert "timebridge_small is not estimated: global_batch_size=64 does not divide" in examined.text
    operators = examined.check(1, "operators")["values"]
    if examined.check(1, "device")["values"]["device"].startswith("gcu"):
        assert {"native_layer_norm_backward", "threshold_backward"} <= set(operators["lacking"])
        assert "native_layer_norm_backward" in operators["portable"]
        assert operators["left_device"] == {}
    else:
        assert operators["lacking"] == []
        assert operators["left_device"] == {}


def test_bytes_that_nobody_counts_are_not_told_as_none():
    class Counts(CpuBackend):
        told: ClassVar = [{"tan": (7, 0)}, {"tan": (10, 0)}, {}, {"tan": (3, 4096)}]

        def fallbacks(self):
            return self.told.pop(0)

    for expected in ("tan run on the CPU", "tan run on the CPU (4 KiB)"):
        found = check_operators(Counts(name="cpu"), torch.device("cpu"), "fp32")
        assert found.values["left_device"] == {"tan": 3}
        assert found.finding.endswith(expected)


@needs_current_card
@pytest.mark.slow
def test_a_training_that_does_not_fit_is_told_with_the_batch_that_does(doctor):
    fits = ["backend=gcu_simulated", "model.d_model=32", "model.d_ff=32", "model.num_heads=2", "data.eval_batch_size=4"]
    examined = doctor(*fits, timeout_s=120)
    assert (examined.code, examined.report["verdict"], examined.report["findings"]) == (0, "ok", [])
    training = examined.report["training"]
    assert 0 < training["memory_peak"] < training["free"]
    assert "timebridge_small takes about " in examined.text
    examined = doctor(*fits, "global_batch_size=262144", "overwrite=true", timeout_s=120)
    assert (examined.code, examined.report["verdict"], examined.report["findings"]) == (0, "ok", [])
    training = examined.report["training"]
    assert (training["fits"], training["rank"]) == (False, 0)
    batch, accumulate = map(int, re.findall(r"=(\d+)", training["advice"]))
    assert batch * accumulate == 262144
    assert accumulate > 1
    assert examined.text.count("takes about") == 1


@pytest.mark.slow
@needs_card
def test_two_ranks_forced_on_one_simulated_card(doctor):
    # Rank 1 counts the cards from the other end: its second one is the first of rank 0, under another number.
    examined = doctor("backend=sick_cards", "nproc=2", sick={1: "sees the others' order"})
    assert examined.code == 1
    assert examined.failures() == {"cards": [0, 1]}, examined.text
    assert "ranks 0, 1 share one card: " in examined.text


@pytest.mark.slow
@needs_card
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["backend.allow_fallback=true"], "failed", "because rank 1: no eccl here"),
        (["backend.process_group=gloo"], "warning", "because backend.process_group names gloo"),
    ],
)
def test_a_group_that_falls_back(doctor, arguments, status, words):
    examined = doctor("backend=sick_cards", "nproc=2", *arguments, sick={1: "lacks collectives"})
    assert examined.code == (1 if status == "failed" else 0), examined.text
    finding = examined.report["findings"][0]
    assert (finding["check"], finding["status"], finding["ranks"]) == ("group", status, [0, 1])
    assert words in finding["finding"]
    # Copies through the CPU are slow, and must add up all the same.
    assert examined.check(0, "all_reduce")["status"] == examined.check(1, "ddp")["status"] == "ok"
    assert examined.result["fallback"]["used"] == "gloo, staged through the CPU"
