"""A bit that flips in what a run has left is found wherever that is read."""

from __future__ import annotations

import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch

import exp as public
from tests.behaviour.conftest import SCENES, losses, result


def flip(path: Path) -> None:
    """One bit in the middle of the largest tensor of a checkpoint."""
    with zipfile.ZipFile(path) as archive:
        tensors = [each for each in archive.infolist() if "/data/" in each.filename]
    largest = max(tensors, key=lambda each: each.file_size)
    content = bytearray(path.read_bytes())
    name, extra = struct.unpack("<HH", content[largest.header_offset + 26 : largest.header_offset + 30])
    content[largest.header_offset + 30 + name + extra + largest.file_size // 2] ^= 4
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_skipped_by_resume_and_refused_by_all_others(exp, trained, copy_of):
    run = copy_of("scenes")
    newest = run / "checkpoints" / "step_00000004.pth"
    flip(newest)
    done = exp(*SCENES, f"output_dir={run}", "resume=auto")
    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stdout
    assert newest.name in done.stdout
    assert losses(run) == losses(trained("scenes"))
    assert result(run)["metrics"] == result(trained("scenes"))["metrics"]
    best = run / "checkpoints" / "best.pth"
    flip(best)
    for arguments in (["task=eval", f"init_from={run}"], [*SCENES, f"output_dir={run}", "resume=auto", "max_steps=5"]):
        done = exp(*arguments, "backend=cpu")
        assert done.returncode in (1, 2)
        assert str(best) in done.stderr.splitlines()[0]
    with pytest.raises(Exception, match=r"best\.pth"):
        public.open_run(run).model()


def test_a_file_that_its_run_did_not_write_there_is_refused_by_name(exp, trained, copy_of):
    run = copy_of("forecast")
    folder, record = run / "checkpoints", run / "result.json"
    best, written = folder / "best.pth", (folder / "best.pth").read_bytes()
    told, ended = result(run), record.read_text()
    assert {"checkpoints/best.pth", "checkpoints/step_00000002.pth"} <= told["digests"].keys()

    def refused(reason: str) -> None:
        with pytest.raises(Exception, match=rf"best\.pth {reason}"):
            public.open_run(run).model()

    shutil.copy(str(folder / "step_00000002.pth"), str(best))
    done = exp("task=eval", "init_from=run", "backend=cpu", "output_dir=tested")
    assert done.returncode in (1, 2), done.stdout
    assert "best.pth is not the file that the run wrote, but checkpoints/step_00000002.pth" in done.stderr
    record.unlink()  # as after kill -9
    refused("is a copy of the checkpoint of step 2")
    shutil.copy(str(trained("steady") / "checkpoints" / "best.pth"), str(best))
    refused("was written by another run")
    record.write_text(ended)
    refused("is not the file that the run wrote, but another one")
    torch.save(torch.load(str(best)), str(best))
    refused("has lost its digest")
    done = exp("task=eval", "init_from=run", "backend=cpu", "output_dir=tested", "checkpoint.trusted=true")
    assert done.returncode == 0, done.stderr
    best.write_bytes(written)
    shutil.move(str(run), str(exp.path("moved")))
    done = exp("task=eval", "init_from=moved", "backend=cpu", "output_dir=tested", "overwrite=true")
    assert done.returncode == 0, done.stderr
    assert result(exp.path("tested"))["metrics"] == told["metrics"]
    assert result(exp.path("tested"))["checkpoint_run"] == told["run_id"]


def test_weights_without_a_digest_are_read_and_that_is_said(exp, trained):
    content = torch.load(str(trained("scenes") / "checkpoints" / "best.pth"), map_location="cpu")
    torch.save(content["state_dict"], str(exp.path("theirs.pth")))
    done = exp("task=eval", "init_from=theirs.pth", *SCENES, "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert "no digest" in done.stdout
    done = exp("task=eval", f"init_from={trained('scenes')}", "backend=cpu", "output_dir=ours")
    assert "no digest" not in done.stdout


def test_a_damaged_record_is_named_by_whoever_reads_it(exp, copy_of):
    run = copy_of("forecast")
    text = (run / "result.json").read_text()
    digit = text.index('"mse": 0.') + 10
    (run / "result.json").write_text(f"{text[:digit]}{(int(text[digit]) + 1) % 10}{text[digit + 1 :]}")
    with pytest.raises(Exception, match=r"result\.json"):
        _ = public.open_run(run).result
    done = exp("task=report", "run=run", "output_dir=report")
    assert "result.json" in done.stdout
    assert "0." not in done.stdout.split("report:")[0]  # no figure of it is shown
    (run / "result.json").write_text(text)
    records = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(records.replace('"step": 4', '"step": 3'))
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("seed: 2023", "seed: 2022"))
    done = exp("task=report", "run=run", "output_dir=report")
    assert "metrics.jsonl" in done.stdout
    assert "config.yaml" in done.stdout
    assert "no digests" not in done.stdout
