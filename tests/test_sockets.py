"""Loader processes are reached by sockets, whose names are short."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from exp import sockets
from exp.errors import ConfigError
from tests.conftest import clean_environment


@pytest.mark.parametrize("arguments", [[], pytest.param(["nproc=2", "launcher.fork=false"], marks=pytest.mark.slow)])
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


def test_where_no_short_folder_is_to_be_had_it_is_said(monkeypatch, tmp_path):
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)  # as in a fresh process
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("t" * 100)))
    monkeypatch.setattr(sockets, "_OTHERS", (str(tmp_path / "none"), os.devnull))
    with pytest.raises(ConfigError, match=r"^TMPDIR=/.*t is too long for the sockets of loader processes.* set TMPDIR"):
        sockets.make_sockets_possible()
    assert sockets.folder_for_sockets() is None
