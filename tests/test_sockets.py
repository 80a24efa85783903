"""Loader processes are reached by sockets, whose names are short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment


def test_a_long_temporary_folder_is_no_matter(exp):
    temporary = exp.folder / ("t" * 80)
    temporary.mkdir()
    settings = ("data.num_workers=1", "max_steps=1", "nproc=2", "launcher.fork=false")
    result = exp.train("run", *settings, fresh=True, timeout=150, TMPDIR=str(temporary))
    assert result["status"] == "completed"
    assert [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []


LOOK = """
import multiprocessing.util
from exp.sockets import make_sockets_possible
make_sockets_possible()
make_sockets_possible()
print(multiprocessing.util.get_temp_dir())
"""


@pytest.mark.parametrize("letters", [1, 100])
def test_a_folder_for_sockets_goes_with_its_process(letters, tmp_path):
    temporary = tmp_path / ("t" * letters)
    temporary.mkdir()
    environment = clean_environment(TMPDIR=str(temporary))
    folder = subprocess.check_output([sys.executable, "-c", LOOK], env=environment, text=True).rstrip()
    assert (Path(folder).parent == temporary) == (letters == 1)
    assert len(folder + "/listener-12345678") <= 107
    assert not Path(folder).exists()
