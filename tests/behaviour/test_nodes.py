"""Several nodes: whoever reaches the meeting point of a job cannot guess its name there, and runs no code."""

from __future__ import annotations

import base64
import pickle
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.behaviour.conftest import FORECAST, wait_for
from tests.conftest import free_port


class _Attack:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def listening(port: int) -> set[str]:
    """The addresses at which somebody listens on a port, as the kernel writes them."""
    lines = [
        line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]
    ]
    return {cells[1].rpartition(":")[0] for cells in lines if cells[3] == "0A" and int(cells[1][-4:], 16) == port}


def test_a_stranger_at_the_meeting_point_runs_no_code(exp, start):
    host = "127.0.0.1"
    port = free_port()
    process = start(*FORECAST, "launcher.nnodes=2", f"launcher.rdzv_endpoint={host}:{port}", "output_dir=run")
    wait_for(lambda: listening(port), process)
    if int(torch.__version__.split(".")[0]) >= 2:  # older torch listens on every interface
        assert listening(port) == {"0100007F"}
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    store.set_timeout(timedelta(seconds=1))
    with pytest.raises(RuntimeError):
        store.get("torch.rendezvous.exp")  # what torch calls it, where the job's id is the default
    if not hasattr(store, "list_keys"):  # where a name that is not known cannot be attacked
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        return
    names = []
    wait_for(lambda: names.extend(name for name in store.list_keys() if "rendezvous" in name) or names, process)
    store.set(names[0], base64.b64encode(pickle.dumps(_Attack(exp.folder / "attacked"))).decode())
    process.communicate(timeout=100)
    assert process.returncode == 1
    assert not (exp.folder / "attacked").exists()
