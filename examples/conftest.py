"""Installs an example as its users would, and runs ``python -m exp`` with it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import exp, run_exp  # noqa: F401 - exp is a fixture here, too


@pytest.fixture(scope="module")
def site(request, tmp_path_factory) -> Path:
    """A folder for PYTHONPATH with the example installed in it.

    Not in the environment, where it would be a plug-in of every other test. Built from a copy: a build leaves folders
    in its sources, and two builds of the same sources conflict.
    """
    example = Path(request.path if hasattr(request, "path") else request.fspath).parents[1]
    place = tmp_path_factory.mktemp(example.name)
    source, target = place / "source", place / "site-packages"
    shutil.copytree(str(example), str(source), ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    found = importlib.util.find_spec
    if found("setuptools") and found("setuptools.command.bdist_wheel"):  # else pip downloads setuptools
        pip.append("--no-build-isolation")
    done = subprocess.run([*pip, "--target", str(target), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture
def run(exp, site):  # noqa: F811
    """Runs ``python -m exp``, which must exit with ``code``."""

    def run(*arguments: str, code: int = 0) -> Any:
        done = run_exp(exp.folder, *arguments, PYTHONPATH=str(site))
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run
