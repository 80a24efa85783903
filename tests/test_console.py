"""The line that says what is waited for: replaced by whatever comes next on a terminal, and never written elsewhere."""

from __future__ import annotations

import json
import os
import pty
import select
import sys

import pytest
from omegaconf import OmegaConf

from exp import console
from exp.config.schema import ExpConfig
from exp.launcher.status import progress_of, time_left
from exp.runfolder import RunFolder
from tests.conftest import TINY


@pytest.fixture
def terminal(monkeypatch):
    """Called in the test, makes stdout a pseudo-terminal; gives what tells what was written to it since."""
    ours, theirs = pty.openpty()
    file = os.fdopen(theirs, "w")
    monkeypatch.setattr(console, "_waits_for", "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")

    def written():
        content = b""
        while select.select([ours], [], [], 0.1)[0]:
            content += os.read(ours, 65536)
        return content.decode()

    def open_it():  # not here: pytest sets its own stdout before the test begins
        monkeypatch.setattr(sys, "stdout", file)
        return written

    yield open_it
    file.close()
    os.close(ours)


CLEAR = "\r\x1b[2K"


def test_a_pipe_is_no_terminal_though_colours_are_asked_for(exp):
    """As Jupyter does for its kernels."""
    done = exp(*TINY, "output_dir=run", FORCE_COLOR="1", CLICOLOR_FORCE="1")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout


def test_on_a_terminal_one_line_replaces_the_other(terminal):
    written = terminal()
    console.wait_for("starting 2 workers")
    console.wait_for("a very long reason to wait for something")
    first, second = written().split(CLEAR)[1:]
    assert first == "starting 2 workers ...\r"
    assert second == "a very long reason to wait fo\r", "it never wraps: the line could not be taken away"
    console.make_console().print("a line that stays")
    cleared, printed, again = written().split(CLEAR)[0:3]
    assert (cleared, printed.strip()) == ("", "a line that stays")
    assert again.startswith("a very long")
    console.waited()
    assert written() == CLEAR


def test_the_time_left_of_a_training(tmp_path):
    folder = RunFolder(tmp_path)
    config = OmegaConf.merge(OmegaConf.structured(ExpConfig), {"global_batch_size": 32, "max_epochs": 10})
    assert time_left(folder, config) == ""
    train = {"split": "train", "step": 120, "epoch": 1, "loss": 0.5, "samples_per_second": 64.0}
    folder.metrics.write_text(json.dumps(train) + "\n")
    assert progress_of(folder) == "step 120  loss 0.5000"
    assert time_left(folder, config) == "", "how long an epoch is, is not known"
    lines = [{"split": "val", "step": 100, "epoch": 1, "mse": 1.0}, train]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"split": "tr')
    assert time_left(folder, config) == "0:07:20 left"  # 880 steps, two in a second
    config.max_steps = 130
    assert time_left(folder, config) == "0:00:05 left"
