from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import clean_environment
from tests.simulators import plugin_on_path

ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def card(tmp_path):
    """Runs a script with the simulated torch_gcu on its path, one process per rank; gives what each printed."""
    # Compiled before the clock of any test starts.
    path = os.pathsep.join([plugin_on_path()["PYTHONPATH"], ROOT, os.environ.get("PYTHONPATH", "")])

    def run(script: str, world_size: int = 1, **environment: str) -> list[str]:
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        place.update(WORLD_SIZE=str(world_size), STORE=str(tmp_path / "store"), PYTHONPATH=path)
        workers = [
            subprocess.Popen(
                [sys.executable, "script.py"],
                env=clean_environment(RANK=rank, LOCAL_RANK=rank, **place, **environment),
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in map(str, range(world_size))
        ]
        try:
            printed = [worker.communicate(timeout=280)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        for worker, text in zip(workers, printed):
            assert worker.returncode == 0, text
        return printed

    return run
