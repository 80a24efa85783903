"""Write the golden losses anew: `python -m tests.golden NAME...`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests import golden

if __name__ == "__main__":
    for name in sys.argv[1:] or golden.SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            command = golden.command(name, ["backend=cpu"], folder)
            subprocess.run([sys.executable, "-m", "exp", *command], check=True)
            content = {
                "command": command[:-1],
                "written_with": f"torch {torch.__version__}, fp32, dropout off",
                "losses": golden.losses(Path(folder) / "tested"),
            }
        (golden.FOLDER / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
