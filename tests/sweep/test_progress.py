"""The bar while the jobs of a large sweep are frozen and written: on a terminal of any width, and nowhere else."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from exp import console
from exp.sweep.display import progress


def shown(monkeypatch, jobs: int, **options) -> str:
    file = io.StringIO()
    monkeypatch.setattr(console, "make_console", lambda: Console(file=file, **options))
    with progress("freezing", jobs) as advance:
        for _ in range(jobs):
            advance()
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 40])
def test_a_bar_on_a_terminal_goes_when_it_is_done(monkeypatch, width):
    drawn = shown(monkeypatch, 60, force_terminal=True, width=width, height=24, _environ={"TERM": "xterm"})
    frames = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame).strip() for frame in re.split(r"[\r\n]", drawn)]
    bars = [frame for frame in frames if frame]
    assert bars[0].startswith("freezing 60 jobs")
    assert "100%" in bars[-1]
    assert max(map(len, bars)) <= width
    assert drawn.endswith("\x1b[1A\x1b[2K"), "the line is cleared"


def test_a_line_in_a_file_and_nothing_for_a_handful_of_jobs(monkeypatch):
    assert shown(monkeypatch, 60, force_terminal=False) == "freezing 60 jobs\n"
    assert shown(monkeypatch, 49, force_terminal=False) == ""
    assert shown(monkeypatch, 49, force_terminal=True, _environ={"TERM": "xterm"}) == ""
