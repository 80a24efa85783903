from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from tests.conftest import ended_well, free_port, start_script
from tests.simulators import plugin_on_path

ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def card(tmp_path):
    """Runs a script with the simulated torch_gcu on its path, one process per rank; gives what each printed.

    Its last line is the last of standard output. ``fresh``: in new interpreters, for what happens while torch loads.
    """
    # Compiled before the clock of any test starts.
    path = os.pathsep.join([plugin_on_path()["PYTHONPATH"], ROOT, os.environ.get("PYTHONPATH", "")])

    def run(script: str, world_size: int = 1, fresh: bool = False, **environment: str) -> list[str]:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
        place.update(STORE=str(tmp_path / "store"), PYTHONPATH=path, **environment)
        script, ranks = textwrap.dedent(script), map(str, range(world_size))
        workers = [start_script(tmp_path, script, fresh=fresh, RANK=rank, LOCAL_RANK=rank, **place) for rank in ranks]
        return [errors + output for output, errors in ended_well(workers)]

    return run
