"""What the machine refuses is told in one line, with the path and what to do, and with the documented exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from exp.errors import ConfigError, UnavailableError
from exp.runs.slurm import check_script
from tests.conftest import TINY, clean_environment, run_exp

# Fills the disk of the run folder in its second step.
FILLS = """
import subprocess
from exp.forecasting.timebridge.model import TimeBridge
class Model(TimeBridge):
    steps = 0
    def losses(self, *batch):
        self.steps += 1
        if self.steps == 2:
            subprocess.run(["dd", "if=/dev/zero", "of=disk/other"], stderr=subprocess.DEVNULL)
        return super().losses(*batch)
"""


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("cannot mount a file system here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_disk_that_is_full_in_mid_run(tmp_path, small_disk, nproc):
    (tmp_path / "fills.py").write_text(FILLS)
    arguments = ["model._target_=fills.Model", "output_dir=disk/run", "log_every=1", f"nproc={nproc}"]
    done = run_exp(tmp_path, *TINY, *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    first, *others = done.stderr.splitlines()
    assert first.startswith("error: rank ")
    assert f"cannot write {small_disk}" in first
    assert any("result.json could not be written: No space left" in line for line in others)
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("arguments", "where"),
    [(["output_dir=afile/x"], "afile/x: Not a directory"), (["output_dir=disk/x"], "disk/x: Read-only file system"),
     (["-m", "output_dir=afile", "seed=1"], "afile: File exists")],
)  # fmt: skip
def test_a_folder_that_cannot_be_used(tmp_path, small_disk, arguments, where):
    (tmp_path / "afile").touch()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    done = run_exp(tmp_path, *arguments, *TINY)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: cannot ")
    assert where in line


@pytest.mark.parametrize("arguments", [["--help"], [*TINY, "output_dir=run"]])
def test_an_output_that_cannot_be_written(tmp_path, arguments):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "exp", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.decode().startswith("error: cannot write stdout: No space left on device"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_current_folder_that_cannot_be_used(tmp_path):
    bad = tmp_path / os.fsdecode(b"caf\xe9")
    bad.mkdir()
    gone = tmp_path / "gone"
    gone.mkdir()
    for folder, then, says in ((bad, "", r"caf\udce9"), (gone, f"rmdir {gone};", "was deleted")):
        command = f"{then} exec {sys.executable} -m exp {' '.join(TINY)}"
        done = subprocess.run(command, shell=True, cwd=folder, env=clean_environment(), capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        assert "current folder" in line
        assert says in line
    assert list(bad.iterdir()) == []


def test_shared_memory_that_cannot_be_used(tmp_path):
    command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o ro none /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("cannot unshare mounts here")
    for words in (["nproc=2"], ["data.num_workers=2"]):
        exp = [sys.executable, "-m", "exp", *TINY, *words, "output_dir=run"]
        done = subprocess.run([*command, *exp], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True)
        assert done.returncode == 3, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: /dev/shm")
    assert not (tmp_path / "run").exists()


def test_a_scheduler_that_does_not_answer_is_not_there(tmp_path, monkeypatch):
    """Whatever sbatch says; but if squeue answers, it is the job that Slurm refuses."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for answer, error in (("exit 1", UnavailableError), ("echo Invalid job id >&2; exit 1", ConfigError)):
        for name, text in (("sbatch", "echo sbatch: error: fatal: no configuration >&2; exit 1"), ("squeue", answer)):
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        with pytest.raises(error, match="no configuration"):
            check_script("#!/bin/sh\n")
