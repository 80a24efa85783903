from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TINY, clean_environment


def test_help_fits_a_screen_and_the_default_configuration_two(exp):
    lines = exp("--help").stdout.rstrip().splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert len(exp("--cfg", "job").stdout.splitlines()) <= 132  # two screens of 66 lines


def test_a_default_run_is_quiet_and_without_colors_in_a_pipe(exp):
    """Also where they are asked for, as Jupyter does for its kernels."""
    done = exp(*TINY, "output_dir=run", FORCE_COLOR="1", CLICOLOR_FORCE="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) <= 23, done.stdout
    for words in ("rank 0/1  local_rank 0  cpu", "MSE", "MAE", "reference", "samples/s", "run"):
        assert words in done.stdout, done.stdout
    assert "\x1b" not in done.stdout
    assert "${" not in (exp.path("run") / "config.yaml").read_text(), "the frozen configuration must be resolved"


@pytest.mark.parametrize("arguments", [["launcher=local"], ["--help"]])
def test_a_run_whose_reader_has_gone_goes_on(exp, arguments):
    reader, writer = os.pipe()
    os.close(reader)  # as after ``| head``
    command = [sys.executable, "-m", "exp", *TINY, *arguments, "output_dir=run"]
    done = subprocess.run(
        command, cwd=exp.folder, env=clean_environment(), stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    if "launcher=local" in arguments:
        assert exp.result("run")["status"] == "completed"


def test_shell_completion_and_info_work(exp):
    command = [str(Path(sys.executable).with_name("exp")), "-sc", "query=bash"]
    environment = clean_environment(COMP_LINE="exp backend=c", COMP_POINT="13")
    said = subprocess.check_output(command, env=environment, cwd=exp.folder, text=True)
    assert said.split() == ["backend=cpu", "backend=cuda"]
    assert "exp.conf" in exp("--info", "searchpath").stdout
