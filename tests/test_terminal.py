"""A terminal of 80 columns, by a pseudo-terminal: what stays there when a run has ended."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios

from exp.report.formats import Table, as_rich
from tests.behaviour.conftest import FORECAST
from tests.conftest import clean_environment


def on_terminal(folder, *arguments: str) -> str:
    """What ``python -m exp`` writes to a terminal of 80 columns, without control sequences."""
    parent, child = os.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "exp", *arguments]
    environment = clean_environment(TERM="xterm")
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=child, stdout=child, stderr=child)
    os.close(child)
    written = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:  # Linux: all writers have closed it
            break
        if not part:
            break
        written += part
    os.close(parent)
    assert process.wait() == 0, written
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


def test_a_wide_table_leaves_columns_out_and_never_folds_a_number():
    from rich.console import Console

    keys = {f"key_of_number_{number}": 10.0**number for number in range(9)}
    row = {"run": "outputs/a folder/with a name", **keys, "mse": 0.12345, "mae_file_units": 2.34567}
    console = Console(width=80, record=True, force_terminal=False, file=io.StringIO())
    console.print(as_rich(Table.of([row])))
    lines = console.export_text().rstrip().splitlines()
    (first,) = (line for line in lines if line.startswith("outputs/a"))
    assert first.split()[-2:] == ["0.12345", "2.34567"]
    assert "file_" in [line.split()[-1] for line in lines[:6]]
    assert "no room for key_of_number_" in "\n".join(lines)


def test_each_epoch_stays_above_the_bar_and_fits_the_line(tmp_path):
    text = on_terminal(tmp_path, *FORECAST, "debug.train_batches=2", "max_epochs=2", "max_steps=null", "output_dir=run")
    lines = [part for line in text.split("\n") for part in line.split("\r")]
    kept = [line for line in lines if re.match(r"epoch \d/2  loss \S+  val_mse ", line)]
    assert [line[:9] for line in kept] == ["epoch 1/2", "epoch 2/2"]
    bars = [line for line in lines if "%" in line and line.startswith("epoch")]
    assert any("ETA" in line for line in bars)
    assert [line for line in [*kept, *bars] if len(line.rstrip()) > 80] == []
