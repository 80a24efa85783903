"""What a terminal shows of a run that goes on."""

from __future__ import annotations

import json
import os
import pty
import select
import sys

from exp import console
from exp.launcher.follow import progress_of
from exp.runs.folder import RunFolder

CLEAR = "\r\x1b[2K"


def test_what_is_waited_for_is_one_line_that_whatever_comes_next_replaces(monkeypatch):
    ours, theirs = pty.openpty()
    monkeypatch.setattr(console, "_waits_for", "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")

    def written():
        content = b""
        while select.select([ours], [], [], 0.1)[0]:
            content += os.read(ours, 65536)
        return content.decode().split(CLEAR)

    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        console.wait_for("starting 2 workers")
        console.wait_for("a very long reason to wait for something")
        # It never wraps: the line could not be taken away.
        assert written() == ["", "starting 2 workers ...\r", "a very long reason to wait fo\r"]
        console.make_console().print("a line that stays")
        cleared, printed, again = written()
        assert (cleared, printed.strip(), again[:11]) == ("", "a line that stays", "a very long")
        console.waited()
        assert written() == ["", ""]
    os.close(ours)


def test_how_far_a_training_is(tmp_path):
    folder = RunFolder(tmp_path)
    assert progress_of(folder) == ""
    train = {"split": "train", "step": 120, "epoch": 1, "loss": 0.5, "samples_per_second": 64.0}
    lines = [{"split": "val", "step": 100, "epoch": 1, "mse": 1.0}, train]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"split": "tr')
    assert progress_of(folder) == "step 120  loss 0.5000"
