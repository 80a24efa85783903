"""The notebooks of examples/, run from the first cell to the last by Jupyter's own runner, in a folder of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment
from tests.docs.reader import ROOT

RUNNER = Path(sys.prefix) / "notebooks"
RUN = """
import sys
import nbformat
from nbclient import NotebookClient
NotebookClient(nbformat.read(sys.argv[1], as_version=4), timeout=280, kernel_name="python3").execute()
"""


@pytest.mark.extended
@pytest.mark.skipif(not RUNNER.is_dir(), reason="no nbclient; make test installs it (Python >= 3.10)")
@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_runs(path, tmp_path):
    kernel = tmp_path / "kernels" / "python3" / "kernel.json"  # this interpreter, whatever kernels are installed
    kernel.parent.mkdir(parents=True)
    arguments = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": arguments, "display_name": "Python 3", "language": "python"}))
    places = {"JUPYTER_PATH": str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython"), "PWD": str(tmp_path)}
    environment = clean_environment(PYTHONPATH=str(RUNNER), **places)
    environment.pop("MPLBACKEND", None)  # the kernel shows figures by a backend of its own
    command = [sys.executable, "-c", RUN, str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
