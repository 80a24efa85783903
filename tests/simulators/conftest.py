from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.conftest import clean_environment


@pytest.fixture
def card(tmp_path):
    """Runs a script with the simulated torch_gcu on its path, one process per rank; gives what each printed."""
    import simulated_gcu
    from simulated_gcu.build import extension

    extension()  # compiled before the clock of any test starts

    def run(script: str, world_size: int = 1, **environment: str) -> list[str]:
        source = tmp_path / "script.py"
        source.write_text(textwrap.dedent(script))
        path = os.pathsep.join([str(simulated_gcu.path()), os.environ.get("PYTHONPATH", "")])
        workers = [
            subprocess.Popen(
                [sys.executable, str(source)],
                env=clean_environment(
                    PYTHONPATH=path,
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(world_size),
                    STORE=str(tmp_path / "store"),
                    **environment,
                ),
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world_size)
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
