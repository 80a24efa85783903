"""Loader processes are reached by sockets, whose names are short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment


@pytest.mark.parametrize("arguments", [[], pytest.param(["nproc=2", "launcher.fork=false"])])
def test_a_long_temporary_folder_is_no_matter(exp, arguments):
    temporary = exp.folder / ("t" * 80)
    temporary.mkdir()
    settings = ("data.num_workers=1", "max_steps=1", *arguments)
    result = exp.train("run", *settings, fresh=True, timeout=150, TMPDIR=str(temporary))
    assert result["status"] == "completed"
    assert [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []


LOOK = """
import multiprocessing.util, sys, tempfile
from exp.sockets import make_sockets_possible
make_sockets_possible()
make_sockets_possible()
print(multiprocessing.util.get_temp_dir())
"""


@pytest.mark.parametrize("letters", [1, 100])
def test_a_folder_for_sockets_goes_with_its_process(letters, tmp_path):
    temporary = tmp_path / ("t" * letters)
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LOOK], env=clean_environment(TMPDIR=str(temporary)), check=True, capture_output=True,
        text=True,
    )  # fmt: skip
    (folder,) = done.stdout.splitlines()
    assert (Path(folder).parent == temporary) == (letters == 1)
    assert len(folder + "/listener-12345678") <= 107
    assert not Path(folder).exists()
