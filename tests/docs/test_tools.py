"""What git runs before a commit is what CI runs; what makes the site is pinned."""

from __future__ import annotations

import re
import subprocess

import yaml

from tests.docs.reader import ROOT


def test_git_runs_the_linters_of_ci():
    shown = subprocess.run(
        ["make", "-n", "lint", "VENV=.venv"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    linters = {command.strip() for command in re.findall(r"\.venv/bin/(?:ruff|mypy)[^&\n]*", shown)}
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert {hook["entry"] for hook in local["hooks"]} == linters
    assert len(linters) == 4
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in local["hooks"])


def name(requirement):
    return re.split(r"[\[<>=]", requirement)[0]


def test_what_makes_the_site_is_the_extra_and_pinned():
    (extra,) = re.findall(r"^docs = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (installed,) = re.findall(r"install -c \$< (.*ruff)", (ROOT / "Makefile").read_text())
    wanted = {name(word) for word in re.findall(r'"([^"]+)"', extra)}
    assert wanted == {name(word.strip("'")) for word in installed.split()}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints" / "docs.txt").read_text(), re.MULTILINE))
    assert wanted <= set(pins)
    linter = re.search(r"^ruff==(\S+)$", (ROOT / "constraints" / "py311-torch2.13.txt").read_text(), re.MULTILINE)
    assert pins["ruff"] == linter[1]
