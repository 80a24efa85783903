"""What the machine refuses is told in one line, with the path and what to do, and with the documented exit code."""

from __future__ import annotations

import subprocess

import pytest

from tests.conftest import TINY, run_exp

# Fills the disk of the run folder in its second step.
FILLS = """
import subprocess
from exp.forecasting.timebridge import TimeBridge
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
