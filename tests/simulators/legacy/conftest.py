from __future__ import annotations

import socket

import pytest


@pytest.fixture
def job(card):
    """Runs a script on simulated cards, one process per rank, which meet over ``env://``; gives what each printed."""

    def run(script: str, world_size: int = 1, **environment: str) -> list[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        return card(script, world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **environment)

    return run


@pytest.fixture
def refused(job):
    """Runs statements that must each raise; gives the errors' texts by statement.

    The statements are lines of a string; ``before`` is run first.
    """

    def run(statements: str, before: str = "", **environment: str) -> dict[str, str]:
        lines = [line.strip() for line in statements.strip().splitlines()]
        script = f"""{before}
import torch, torch_gcu
for line in {lines!r}:
    try:
        exec(line)
    except Exception as error:
        said = str(error).splitlines()[0]
        print(f"{{line}} => {{type(error).__name__}}: {{said}}")
    else:
        print(f"{{line}} => nothing")
"""
        (printed,) = job(script, **environment)
        return dict(line.split(" => ", 1) for line in printed.splitlines() if " => " in line)

    return run
